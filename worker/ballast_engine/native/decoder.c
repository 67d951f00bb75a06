/* A decoder's step: embedding, layers, head; the arithmetic of models/decoder.py without a call per operation. */
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

INLINE void normalize_rows(team member, const float *x, const float *weight, int64_t rows, int64_t size, float eps,
                           float *out) {
    SHARE(rows, member, from, to);
    for (int64_t row = from; row < to; row++) normalize(x + row * size, weight, size, eps, out + row * size);
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
    }
}

/* Normalize (where the model does) and rotate q and k in place, and write k and v to their slots. */
static void place(team member, const layer *l, const step *s, float eps, float *qkv) {
    const attention *a = &l->attention;
    const int64_t dim = a->head_dim, q_size = a->num_heads * dim, kv_size = a->num_kv_heads * dim;
    SHARE(s->num_rows, member, from, to);
    for (int64_t row = from; row < to; row++) {
        float *q = qkv + row * (q_size + 2 * kv_size), *k = q + q_size;
        const float *cosines = s->cosines + s->positions[row] * (dim / 2);
        const float *sines = s->sines + s->positions[row] * (dim / 2);
        for (int64_t head = 0; head < a->num_heads; head++) {
            if (l->q_norm) normalize(q + head * dim, l->q_norm, dim, eps, q + head * dim);
            rotate(q + head * dim, cosines, sines, dim / 2);
        }
        for (int64_t head = 0; head < a->num_kv_heads; head++) {
            if (l->k_norm) normalize(k + head * dim, l->k_norm, dim, eps, k + head * dim);
            rotate(k + head * dim, cosines, sines, dim / 2);
        }
        write_row(a, s->slots[row], k, k + kv_size);
    }
}

/* `x` holds the hidden states; `scratch` has room for `widest` floats per row behind each other: normed, qkv, seen. */
static void run_layer(team member, const decoder *d, const layer *l, step *s, float *x, float *scratch) {
    const attention *a = &l->attention;
    const int64_t rows = s->num_rows, hidden = d->hidden, q_size = a->num_heads * a->head_dim;
    const int64_t qkv_size = q_size + 2 * a->num_kv_heads * a->head_dim;
    const float eps = (float)d->norm_eps;
    float *normed = scratch, *qkv = normed + rows * hidden, *seen = qkv + rows * qkv_size, *inner = qkv;
    if (member.rank == 0) s->next_task = 0;
    normalize_rows(member, x, l->input_norm, rows, hidden, eps, normed);
    meet(member);
    multiply(member, rows, hidden, qkv_size, normed, hidden, l->qkv, l->qkv_bias, qkv, qkv_size, STORE);
    meet(member);
    place(member, l, s, eps, qkv);
    meet(member);
    attend(a, s, qkv, qkv_size, seen, q_size);
    meet(member);
    multiply(member, rows, q_size, hidden, seen, q_size, l->output, l->output_bias, x, hidden, ADD);
    meet(member);
    normalize_rows(member, x, l->mlp_norm, rows, hidden, eps, normed);
    meet(member);
    multiply(member, rows, hidden, d->inner, normed, hidden, l->gate_up, l->gate_up_bias, inner, d->inner, GATED);
    meet(member);
    multiply(member, rows, d->inner, hidden, inner, d->inner, l->down, l->down_bias, x, hidden, ADD);
}

/* Compute layers from `layer` on; returns the first one not computed, which is `num_layers` unless `*stop` was set. */
int64_t ballast_layers(const decoder *d, step *s, float *x, float *scratch, int64_t layer, const volatile int32_t *stop,
                       int64_t threads) {
    if (layer == 0)
        for (int64_t row = 0; row < s->num_rows; row++)
            memcpy(x + row * d->hidden, d->embedding + s->token_ids[row] * d->hidden, (size_t)d->hidden * sizeof(float));
    for (; layer < d->num_layers; layer++) {
        if (stop && *stop) break;
        if (threads == 1) {
            run_layer((team){0, 1}, d, d->layers + layer, s, x, scratch);
            continue;
        }
#pragma omp parallel num_threads((int)threads)
        run_layer((team){omp_get_thread_num(), omp_get_num_threads()}, d, d->layers + layer, s, x, scratch);
    }
    return layer;
}

static void run_head(team member, const decoder *d, const float *x, const int64_t *rows, int64_t count, float *scratch,
                     float *logits) {
    SHARE(count, member, from, to);
    for (int64_t i = from; i < to; i++)
        normalize(x + rows[i] * d->hidden, d->norm, d->hidden, (float)d->norm_eps, scratch + i * d->hidden);
    meet(member);
    multiply(member, count, d->hidden, d->vocabulary, scratch, d->hidden, d->head, 0, logits, d->vocabulary, STORE);
}

/* Logits of some rows of `x`. */
void ballast_head(const decoder *d, const float *x, const int64_t *rows, int64_t count, float *scratch, float *logits,
                  int64_t threads) {
    if (threads == 1) {
        run_head((team){0, 1}, d, x, rows, count, scratch, logits);
        return;
    }
#pragma omp parallel num_threads((int)threads)
    run_head((team){omp_get_thread_num(), omp_get_num_threads()}, d, x, rows, count, scratch, logits);
}
