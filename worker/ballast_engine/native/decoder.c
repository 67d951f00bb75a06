/* A decoder's step: embedding, layers, head; the same computation as models/decoder.py, in one call. */
#include "step.h"

typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias;
    const float *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    attention attention;
} layer;

typedef struct {
    int64_t num_layers, hidden, inner, vocabulary;
    double norm_eps;
    const float *embedding, *norm, *head;
    const layer *layers;
} decoder;

INLINE void normalize(const float *x, const float *weight, int64_t size, float eps, float *out) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float scale = 1.0f / sqrtf(total / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
    }
}

/* One layer's work on a step: `x` holds the hidden states, the rest is scratch. */
typedef struct {
    const decoder *d;
    const layer *l;
    const step *s;
    float *x, *normed, *qkv, *seen, *inner;
} pass;

static void normalize_share(const pass *p, share part, const float *weight) {
    const int64_t size = p->d->hidden;
    SHARE(p->s->num_rows, part, from, to);
    for (int64_t row = from; row < to; row++)
        normalize(p->x + row * size, weight, size, (float)p->d->norm_eps, p->normed + row * size);
}

static void before_attention(const void *context, share part) {
    normalize_share(context, part, ((const pass *)context)->l->input_norm);
}

static void before_mlp(const void *context, share part) {
    normalize_share(context, part, ((const pass *)context)->l->mlp_norm);
}

/* Normalize (if the model does) and rotate q and k in place, and write k and v to their slots. */
static void place(const void *context, share part) {
    const pass *p = context;
    const layer *l = p->l;
    const attention *a = &l->attention;
    const float eps = (float)p->d->norm_eps;
    const int64_t dim = a->head_dim, q_size = a->num_heads * dim, kv_size = a->num_kv_heads * dim;
    SHARE(p->s->num_rows, part, from, to);
    for (int64_t row = from; row < to; row++) {
        float *q = p->qkv + row * (q_size + 2 * kv_size), *k = q + q_size;
        const float *cosines = p->s->cosines + p->s->positions[row] * (dim / 2);
        const float *sines = p->s->sines + p->s->positions[row] * (dim / 2);
        for (int64_t head = 0; head < a->num_heads; head++) {
            if (l->q_norm) normalize(q + head * dim, l->q_norm, dim, eps, q + head * dim);
            rotate(q + head * dim, cosines, sines, dim / 2);
        }
        for (int64_t head = 0; head < a->num_kv_heads; head++) {
            if (l->k_norm) normalize(k + head * dim, l->k_norm, dim, eps, k + head * dim);
            rotate(k + head * dim, cosines, sines, dim / 2);
        }
        write_row(a, p->s->slots[row], k, k + kv_size);
    }
}

static void run_layer(pool *helpers, const pass *p) {
    const decoder *d = p->d;
    const layer *l = p->l;
    const int64_t rows = p->s->num_rows, hidden = d->hidden, q_size = l->attention.num_heads * l->attention.head_dim;
    const int64_t qkv_size = q_size + 2 * l->attention.num_kv_heads * l->attention.head_dim;
    each(helpers, rows, before_attention, p);
    multiply(helpers, rows, hidden, qkv_size, p->normed, hidden, l->qkv, l->qkv_bias, p->qkv, qkv_size, STORE);
    each(helpers, rows, place, p);
    attend(helpers, &l->attention, p->s, p->qkv, qkv_size, p->seen, q_size);
    multiply(helpers, rows, q_size, hidden, p->seen, q_size, l->output, l->output_bias, p->x, hidden, ADD);
    each(helpers, rows, before_mlp, p);
    multiply(helpers, rows, hidden, d->inner, p->normed, hidden, l->gate_up, l->gate_up_bias, p->inner, d->inner, GATED);
    multiply(helpers, rows, d->inner, hidden, p->inner, d->inner, l->down, l->down_bias, p->x, hidden, ADD);
}

/* Compute layers from `layer` on, and return the first layer that was not computed. This is `num_layers`, unless another
 * thread lowered `*end` (NULL: no thread may). `scratch` holds normed, qkv and seen (or inner, at the same place) of
 * every row. Its content is not used after a layer. */
int64_t ballast_layers(const decoder *d, const step *s, float *x, float *scratch, int64_t layer,
                       const volatile int32_t *end, pool *helpers) {
    if (layer == 0)
        for (int64_t row = 0; row < s->num_rows; row++)
            memcpy(x + row * d->hidden, d->embedding + s->token_ids[row] * d->hidden, (size_t)d->hidden * sizeof(float));
    for (; layer < d->num_layers; layer++) {
        if (end && layer >= *end) break;
        const attention *a = &d->layers[layer].attention;
        float *qkv = scratch + s->num_rows * d->hidden;
        float *seen = qkv + s->num_rows * (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
        const pass p = {d, d->layers + layer, s, x, scratch, qkv, seen, qkv};
        run_layer(helpers, &p);
    }
    return layer;
}

typedef struct {
    const decoder *d;
    const float *x;
    const int64_t *rows;
    int64_t count;
    float *normed;
} ending;

static void before_head(const void *context, share part) {
    const ending *e = context;
    const int64_t size = e->d->hidden;
    SHARE(e->count, part, from, to);
    for (int64_t i = from; i < to; i++)
        normalize(e->x + e->rows[i] * size, e->d->norm, size, (float)e->d->norm_eps, e->normed + i * size);
}

/* Logits of some rows of `x`. */
void ballast_head(const decoder *d, const float *x, const int64_t *rows, int64_t count, float *scratch, float *logits,
                  pool *helpers) {
    const ending e = {d, x, rows, count, scratch};
    each(helpers, count, before_head, &e);
    multiply(helpers, count, d->hidden, d->vocabulary, scratch, d->hidden, d->head, 0, logits, d->vocabulary, STORE);
}
