#include "kind.h"

const stepwire::Kind stepwire::kFloat32 = stepwire::kind_of<float>();
