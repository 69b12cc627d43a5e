#include "kind.h"

const stepwire::Kind stepwire::kBfloat16 = stepwire::kind_of<stepwire::bf16>();
