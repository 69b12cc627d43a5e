#include "kind.h"

const stepwire::Kind stepwire::kFloat16 = stepwire::kind_of<stepwire::f16>();
