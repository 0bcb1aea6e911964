/* Half-precision formats, by their bits: exact upwards, to nearest even downwards, NaN stays NaN. */

static inline uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void PATH(half_to_single)(const uint16_t *from, int64_t count, float *to)
{
    for (int64_t k = 0; k < count; k++) {
        uint32_t half = from[k], sign = (half & 0x8000) << 16, body = (half & 0x7FFF) << 13;
        uint32_t normal = body + ((uint32_t)(127 - 15) << 23);
        uint32_t special = body + ((uint32_t)(255 - 31) << 23);                     /* infinity and NaN */
        uint32_t small = float_bits((float)(int32_t)(half & 0x3FF) * 0x1p-24f); /* subnormal in float16, normal here */
        uint32_t bits = body >= 0x0F800000 ? special : body < 0x00800000 ? small : normal;
        to[k] = float_of(sign | bits);
    }
}

static void PATH(single_to_half)(const float *from, int64_t count, uint16_t *to)
{
    for (int64_t k = 0; k < count; k++) {
        uint32_t bits = float_bits(from[k]), sign = bits >> 16 & 0x8000, body = bits & 0x7FFFFFFF;
        /* Adding half a step of float16, less one if the number is even, rounds to nearest even by carry. */
        uint32_t rounded = (body - ((uint32_t)(127 - 15) << 23) + 0xFFF + (body >> 13 & 1)) >> 13;
        /* Under 2**-14 the steps are 2**-24: added to 1/2, whose steps in float32 are the same, they round there. */
        uint32_t small = float_bits(float_of(body < 0x38800000 ? body : 0) + 0.5f) - float_bits(0.5f);
        uint32_t lost = body >> 13 & 0x3FF; /* a NaN keeps the top of its payload, and never becomes infinity */
        uint32_t nan = 0x7C00 | (lost ? lost : 1);
        uint32_t half = body > 0x7F800000 ? nan : body >= 0x47800000 ? 0x7C00 : body < 0x38800000 ? small : rounded;
        to[k] = (uint16_t)(sign | half);
    }
}

static void PATH(bfloat16_to_single)(const uint16_t *from, int64_t count, float *to)
{
    for (int64_t k = 0; k < count; k++) to[k] = float_of((uint32_t)from[k] << 16);
}
