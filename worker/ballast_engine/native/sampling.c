/* The next token of each row, as sampling.py describes it, without sorting.
 *
 * One number decides which tokens top_k and top_p keep: the smallest mass that stays. A bisection over bit patterns finds
 * it, with one pass over the row for each bit. The bit patterns of positive floats have the order of the floats.
 */
#include "step.h"

#define GREEDY_BELOW 1e-5f
#define STRIDE (8 * LANES)

typedef double wide_vec __attribute__((vector_size(LANES * 8)));

/* The sampling options of a row. Mirrored in library.py. */
typedef struct {
    float temperature, min_p;
    double top_p, uniform;
    int64_t top_k;
} draw;

typedef struct {
    double mass;
    int64_t count;
} amount;

static int64_t greedy(const float *logits, int64_t size) {
    vec best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) best = larger(load(logits + i), best);
    float top = largest(best);
    for (; i < size; i++) top = logits[i] > top ? logits[i] : top;
    for (i = 0; i < size; i++)
        if (logits[i] == top) return i;
    return 0;
}

INLINE double sum_wide(wide_vec value) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

/* Mass and number of the tokens of at least `least`; `size` is a multiple of LANES. */
static amount at_least(const float *mass, int64_t size, float least) {
    wide_vec total = {0};
    ivec count = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec here = load(mass + i);
        const ivec stays = here >= least;
        total += __builtin_convertvector((vec)((ivec)here & stays), wide_vec);
        count -= stays;
    }
    amount found = {sum_wide(total), 0};
    for (int lane = 0; lane < LANES; lane++) found.count += count[lane];
    return found;
}

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Move the masses in [low, high) to the front of `to`, filled up with zeros to a multiple of LANES. */
static int64_t narrow(const float *from, int64_t size, float low, float high, float *to) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) {
        const float here = from[i];
        to[count] = here;
        count += (here >= low) & (here < high);
    }
    while (count % LANES) to[count++] = 0;
    return count;
}

/* The largest mass for which the tokens of at least it are `count` in number and `total` in sum. `spare` is a
 * buffer of the size of the row: the remaining candidates move there as their number falls. */
static float threshold(const float *mass, int64_t size, int64_t count, double total, float *spare) {
    uint32_t enough = 1, above = 0x3f800001u; /* the tiniest float, and just over the largest mass, which is 1 */
    amount removed = {0, 0}, at_enough = at_least(mass, size, as_float(enough)), at_above = {0, 0};
    while (above - enough > 1) {
        const uint32_t middle = enough + (above - enough) / 2;
        amount found = at_least(mass, size, as_float(middle));
        found.mass += removed.mass;
        found.count += removed.count;
        if (found.count >= count && found.mass >= total) {
            enough = middle;
            at_enough = found;
        } else {
            above = middle;
            at_above = found;
        }
        if (size > 4 * LANES && 2 * (at_enough.count - at_above.count) <= size) {
            size = narrow(mass, size, as_float(enough), as_float(above), spare);
            mass = spare;
            removed = at_above;
        }
    }
    return as_float(enough);
}

static void keep(float *mass, int64_t size, float least, int64_t ties) {
    for (int64_t i = 0; i < size; i++) {
        if (mass[i] > least) continue;
        if (mass[i] == least && ties > 0) ties--;
        else mass[i] = 0;
    }
}

static void truncate_to(float *mass, int64_t size, const draw *how, float *spare) {
    const float tiniest = as_float(1);
    amount all = at_least(mass, size, tiniest);
    if (how->top_k > 0 && how->top_k < all.count) {
        const float least = threshold(mass, size, how->top_k, 0, spare);
        const amount over = at_least(mass, size, nextafterf(least, 2));
        keep(mass, size, least, how->top_k - over.count);
        all = at_least(mass, size, tiniest);
    }
    if (how->top_p < 1.0) {
        const double wanted = how->top_p * all.mass;
        const float least = threshold(mass, size, 1, wanted, spare);
        const amount over = at_least(mass, size, nextafterf(least, 2));
        const double ties = ceil((wanted - over.mass) / (double)least);
        keep(mass, size, least, over.count == 0 && ties < 1 ? 1 : (int64_t)ties);
    }
}

INLINE double block_mass(const float *mass, int64_t size, int64_t block) {
    return at_least(mass + block, size - block < STRIDE ? size - block : STRIDE, 0).mass;
}

/* The first token at which the sum of masses exceeds the share `uniform` of all; a token of mass 0 is never taken. */
static int64_t invert(const float *mass, int64_t size, double uniform) {
    double all = 0, before = 0, reached = 0;
    int64_t chosen = 0, from = 0;
    for (int64_t block = 0; block < size; block += STRIDE) all += block_mass(mass, size, block);
    const double wanted = uniform * all;
    for (int64_t block = 0; block < size && before <= wanted; block += STRIDE) {
        const double here = block_mass(mass, size, block);
        if (here > 0) {
            from = block;
            reached = before;
        }
        before += here;
    }
    for (int64_t i = from; i < size && i < from + STRIDE && reached <= wanted; i++) {
        if (mass[i] <= 0) continue;
        chosen = i;
        reached += mass[i];
    }
    return chosen;
}

static int64_t drawn(const float *logits, int64_t size, const draw *how, float *mass) {
    const int64_t filled = (size + LANES - 1) / LANES * LANES;
    const float top = logits[greedy(logits, size)], inverse = 1.0f / how->temperature;
    for (int64_t i = 0; i < filled; i++) mass[i] = i < size ? logits[i] - top : -INFINITY;
    for (int64_t i = 0; i < filled; i += LANES) {
        const vec here = exponential(load(mass + i) * inverse);
        store(mass + i, choose(here >= how->min_p, here, splat(0.0f)));
    }
    if (how->top_k > 0 || how->top_p < 1.0) truncate_to(mass, filled, how, mass + filled);
    return invert(mass, filled, how->uniform);
}

/* `scratch` holds two rows, each padded to a multiple of LANES. */
void ballast_sample(const float *logits, int64_t rows, int64_t vocabulary, const draw *how, float *scratch,
                    int64_t *tokens) {
    for (int64_t row = 0; row < rows; row++) {
        const float *here = logits + row * vocabulary;
        tokens[row] = how[row].temperature < GREEDY_BELOW ? greedy(here, vocabulary)
                                                          : drawn(here, vocabulary, how + row, scratch);
    }
}
