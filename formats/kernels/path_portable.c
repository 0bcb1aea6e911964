/* The portable path. */
#include "kernels.h"

#define PATH_NAME portable
#define PATH_LABEL "portable"
#define PATH_SIMD "simd_portable.h"
#include "path.h"

