/* Vectors of floats in the compiler's own notation, so that one source serves AVX-512, AVX2, SSE and NEON.
 *
 * This file, and the files that include it, compute each result in a fixed order that depends only on the inputs of that
 * result. The order does not depend on the number of rows in a call, the tiling, or the number of threads. The tokens of
 * a request therefore do not depend, bit for bit, on other requests. Do not compile with -ffast-math.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4 /* as many as a register has: vectors of two SSE registers made a prompt 18 times slower */
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t half_anywhere __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vec load(const float *from) { return *(const vec_anywhere *)from; }
INLINE void store(float *to, vec value) { *(vec_anywhere *)to = value; }
INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float sum(vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

INLINE float largest(vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
    return lanes[0];
}

/* e^x within 2 ulp for x <= 88; 0 below -87, because the true value is under 2e-38. */
INLINE vec exponential(vec x) {
    const ivec vanishes = x < -87.0f;
    x = choose(vanishes, splat(0.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    const vec magic = splat(12582912.0f); /* adding it rounds to an integer */
    const vec rounded = x * 1.44269504f + magic;
    const vec n = rounded - magic;
    const vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const ivec power = (((ivec)rounded - (ivec)magic) + 127) << 23;
    return choose(vanishes, splat(0.0f), p * (vec)power);
}
