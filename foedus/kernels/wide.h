/* The loops of compiled.c that gain from wide vectors. Included twice, for any processor and for those with vectors of eight numbers: WIDE(name)
   tells the two apart. (One function compiled for several processors would not do: vectors that some of them lack are taken apart first.) */

/* z[r][j] = <x_r, w_j> for R rows and J outputs; R and J are constants, so that all sums stay in registers. */
ALWAYS void WIDE(dots)(const float **x, const float *w, size d, float *z, size k, const int R, const int J)
{
    Vec sums[3][4], here[3];
    size i = 0;
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++)
            sums[r][j] = (Vec){0};
    for (; i + LANES <= d; i += LANES) {
        for (int r = 0; r < R; r++)
            here[r] = *(const Vec *)(x[r] + i);
        for (int j = 0; j < J; j++) {
            Vec there = *(const Vec *)(w + j * d + i);
            for (int r = 0; r < R; r++)
                sums[r][j] += here[r] * there;
        }
    }
    if (i < d && d >= LANES) { /* the last eight, without those that have been added */
        Mask left = COLUMNS >= (int32_t)(i - (d - LANES));
        i = d - LANES;
        for (int r = 0; r < R; r++)
            here[r] = (Vec)((Mask) * (const Vec *)(x[r] + i) & left);
        for (int j = 0; j < J; j++)
            for (int r = 0; r < R; r++)
                sums[r][j] += here[r] * *(const Vec *)(w + j * d + i);
        i = d;
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) {
            Vec s = sums[r][j];
            float total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            for (size l = i; l < d; l++)
                total += x[r][l] * w[j * d + l];
            z[r * k + j] = total;
        }
}

#define DOTS(R, J) case R * 8 + J: WIDE(dots)(x, w, d, z, k, R, J); break;

/* What the model says of n rows; meanwhile, rows that come next are fetched from memory. */
ALWAYS void WIDE(outputs)(const float **rows, size n, const float **next, size n_next, const float *weight, const float *bias, size d, size k, float *out)
{
    for (size r = 0; r < n; r += 3) {
        for (size l = r; l < r + 3 && l < n_next; l++)
            for (size i = 0; i < d; i += 16)
                __builtin_prefetch(next[l] + i);
        for (size j = 0; j < k; j += 4) {
            const float **x = rows + r, *w = weight + j * d;
            float *z = out + r * k + j;
            switch ((n - r < 3 ? n - r : 3) * 8 + (k - j < 4 ? k - j : 4)) {
                DOTS(3, 4) DOTS(3, 3) DOTS(3, 2) DOTS(3, 1) DOTS(2, 4) DOTS(2, 3) DOTS(2, 2) DOTS(2, 1)
                DOTS(1, 4) DOTS(1, 3) DOTS(1, 2) DOTS(1, 1)
            }
        }
    }
    if (bias)
        for (size r = 0; r < n; r++)
            for (size j = 0; j < k; j++)
                out[r * k + j] += bias[j];
}

/* Sixteen columns of w_j <- keep w_j + sum_r slope[r][j] x_r, for J outputs; `skip` of them are done already. */
ALWAYS void WIDE(columns)(const float **x, size n, float *w, size d, const float *slope, size k, float keep, size i, int32_t skip, const int J)
{
    Mask first = COLUMNS >= skip, second = COLUMNS >= skip - LANES;
    Vec low[6], high[6], keep_low, keep_high;
    for (int l = 0; l < LANES; l++) {
        keep_low[l] = first[l] ? keep : 1;
        keep_high[l] = second[l] ? keep : 1;
    }
    for (int j = 0; j < J; j++) {
        low[j] = *(Vec *)(w + j * d + i) * keep_low;
        high[j] = *(Vec *)(w + j * d + i + LANES) * keep_high;
    }
    for (size r = 0; r < n; r++) {
        Vec a = *(const Vec *)(x[r] + i), b = *(const Vec *)(x[r] + i + LANES);
        if (skip) {
            a = (Vec)((Mask)a & first);
            b = (Vec)((Mask)b & second);
        }
        for (int j = 0; j < J; j++) {
            low[j] += a * slope[r * k + j];
            high[j] += b * slope[r * k + j];
        }
    }
    for (int j = 0; j < J; j++) {
        *(Vec *)(w + j * d + i) = low[j];
        *(Vec *)(w + j * d + i + LANES) = high[j];
    }
}

ALWAYS void WIDE(move)(const float **x, size n, float *w, size d, const float *slope, size k, float keep, const int J)
{
    size i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES)
        WIDE(columns)(x, n, w, d, slope, k, keep, i, 0, J);
    if (i < d && d >= 2 * LANES) {
        WIDE(columns)(x, n, w, d, slope, k, keep, d - 2 * LANES, (int32_t)(i - (d - 2 * LANES)), J);
        i = d;
    }
    for (; i < d; i++)
        for (int j = 0; j < J; j++) {
            float total = w[j * d + i] * keep;
            for (size r = 0; r < n; r++)
                total += x[r][i] * slope[r * k + j];
            w[j * d + i] = total;
        }
}

#define MOVE(J) case J: WIDE(move)(x + r, rows, weight + j * d, d, slope + r * k + j, k, r ? 1 : keep, J); break;

/* W <- keep W + slope^T X, for no more rows at a time than the cache holds. */
ALWAYS void WIDE(moves)(const float **x, size n, float *weight, size d, const float *slope, size k, float keep)
{
    size blocks = (k + 5) / 6; /* of as equal a size as can be */
    for (size r = 0; r == 0 || r < n; r += ROWS) {
        size rows = n - r < ROWS ? n - r : ROWS;
        for (size block = 0; block < blocks; block++) {
            size j = k * block / blocks;
            switch (k * (block + 1) / blocks - j) {
                MOVE(1) MOVE(2) MOVE(3) MOVE(4) MOVE(5) MOVE(6)
            }
        }
    }
}

/* e to each of n numbers (and up to seven more, for which there must be room), at least e^-87 and at most e^88, within two units in the last place:
   2^m times seven terms of the series at the rest, which is at most half of log 2. What is no number stays none. */
ALWAYS void WIDE(exps)(float *z, size n)
{
    const float half = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer, in its lowest bits */
    for (size i = 0; i < n; i += LANES) {
        Vec x = *(Vec *)(z + i), least = (Vec){0} - 87.0f, most = (Vec){0} + 88.0f;
        Mask below = x < least, above = x > most;
        x = (Vec)(((Mask)x & ~(below | above)) | ((Mask)least & below) | ((Mask)most & above));
        Vec shifted = x * 1.44269504f + half, m = shifted - half;
        Vec r = x - m * 0.693359375f + m * 2.12194440e-4f;
        Vec sum = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r * (1 / 5040.f)))))));
        *(Vec *)(z + i) = sum * (Vec)(((Mask)shifted << 23) + 0x3F800000);
    }
}

/* From outputs z of the rows of a step to -lr share times the derivatives of their losses. */
ALWAYS void WIDE(slopes)(const Linear *m, size step, size n, float *z)
{
    size k = m->k, at = 0;
    if (m->loss == CROSS_ENTROPY)
        for (size r = 0; r < n; r++) {
            float *row = z + r * k, top = row[0];
            for (size j = 1; j < k; j++)
                top = row[j] > top ? row[j] : top;
            for (size j = 0; j < k; j++)
                row[j] -= top;
        }
    if (m->loss == LOGISTIC)
        for (size j = 0; j < n * k; j++)
            z[j] = -z[j];
    if (m->loss == CROSS_ENTROPY || m->loss == LOGISTIC)
        WIDE(exps)(z, n * k);
    for (size i = step * m->b; i < (step + 1) * m->b; i++) {
        if (m->shares[i] == 0)
            continue;
        float *row = z + k * at++, factor = -m->lr * m->shares[i], total = 0;
        size from = m->used[i];
        if (m->loss == CROSS_ENTROPY) {
            for (size j = 0; j < k; j++)
                total += row[j];
            for (size j = 0; j < k; j++)
                row[j] *= factor / total;
            row[m->labels[from]] -= factor;
            continue;
        }
        for (size j = 0; j < k; j++) {
            float y = m->labels ? (float)(m->labels[from] == j) : m->targets[from * k + j];
            float slope = (m->loss == LOGISTIC ? 1 / (1 + row[j]) : row[j]) - y;
            if (m->loss == HUBER)
                slope = slope > m->delta ? m->delta : slope < -m->delta ? -m->delta : slope;
            row[j] = slope * factor;
        }
    }
}

/* Where the rows of a step lie; those of weight 0 are there to fill up. Rows and labels that there are not end the work. */
ALWAYS size WIDE(rows_of)(Linear *m, size step, const float **x)
{
    size n = 0;
    for (size i = step * m->b; i < (step + 1) * m->b; i++) {
        if (m->shares[i] == 0)
            continue;
        if (m->used[i] < 0 || m->used[i] >= m->rows || (m->labels && (m->labels[m->used[i]] < 0 || m->labels[m->used[i]] >= m->k))) {
            m->failed = NO_SUCH_ROW;
            return 0;
        }
        x[n++] = m->x + m->used[i] * m->d;
    }
    return n;
}

/* All steps of some of the clients, one client after the other: its weights stay in cache. */
static void WIDE(train_some)(void *about, size first, size last)
{
    Linear *m = about;
    size d = m->d, k = m->k, b = m->b;
    const float **now = malloc(2 * (size_t)b * sizeof *now), **next = now + b;
    float *z = malloc((size_t)(b * k + LANES) * sizeof *z);
    if (now == NULL || z == NULL)
        m->failed = NO_MEMORY;
    size n_next = m->failed ? 0 : WIDE(rows_of)(m, first, next);
    for (size i = first; i < last && !m->failed; i++) {
        float *weight = m->weight + i * k * d, *bias = m->bias ? m->bias + i * k : NULL;
        for (size t = 0; t < m->steps[i] && !m->failed; t++) {
            size step = t * m->clients + i, n = n_next;
            const float **swap = now;
            now = next, next = swap;
            n_next = t + 1 < m->steps[i] ? WIDE(rows_of)(m, step + m->clients, next) : i + 1 < last ? WIDE(rows_of)(m, i + 1, next) : 0;
            WIDE(outputs)(now, n, next, n_next, weight, bias, d, k, z);
            WIDE(slopes)(m, step, n, z);
            WIDE(moves)(now, n, weight, d, z, k, m->keep);
            if (m->more_weight)
                for (size j = 0; j < k * d; j++)
                    weight[j] -= m->lr * m->more_weight[i * k * d + j];
            if (bias)
                for (size j = 0; j < k; j++) {
                    float total = bias[j] * m->keep - (m->more_bias ? m->lr * m->more_bias[i * k + j] : 0);
                    for (size r = 0; r < n; r++)
                        total += z[r * k + j];
                    bias[j] = total;
                }
        }
    }
    free(now < next ? now : next);
    free(z);
}

/* Several rows abreast, without branches: while one waits for memory, others go on. */
ALWAYS void WIDE(walk)(const Node *nodes, int32_t root, const float *x, size d, int32_t at[ABREAST])
{
    int32_t moved;
    for (int r = 0; r < ABREAST; r++)
        at[r] = root;
    do {
        moved = 0;
        for (int r = 0; r < ABREAST; r++) {
            const Node *node = nodes + at[r];
            int32_t next = node->child[!(x[r * d + node->feature] <= node->threshold)];
            moved |= next ^ at[r];
            at[r] = next;
        }
    } while (moved);
}

/* In double precision, where the products of single numbers are exact: the same bits however it is compiled. */
static void WIDE(add_trees)(void *about, size first, size last)
{
    Forest *f = about;
    size d = f->d, k = f->k, block = f->block;
    float *padded = malloc((size_t)(ABREAST * d) * sizeof *padded);
    double *totals = malloc((size_t)(block * k) * sizeof *totals);
    if (totals == NULL || padded == NULL)
        f->failed = NO_MEMORY;
    for (size piece = first; piece < last && !f->failed; piece++) {
        size begin = piece * block, rows = f->n - begin < block ? f->n - begin : block, whole = rows - rows % ABREAST;
        if (whole < rows) { /* the last few stand with copies of the last */
            for (size r = 0; r < ABREAST; r++)
                memcpy(padded + r * d, f->x + (begin + (whole + r < rows ? whole + r : rows - 1)) * d, (size_t)d * sizeof *padded);
        }
        memset(totals, 0, (size_t)(rows * k) * sizeof *totals);
        for (size t = 0; t < f->trees; t++) {
            double share = f->shares[t];
            for (size r = 0; r < rows; r += ABREAST) {
                int32_t at[ABREAST];
                WIDE(walk)(f->nodes, f->roots[t], r < whole ? f->x + (begin + r) * d : padded, d, at);
                for (size l = 0; l < ABREAST && r + l < rows; l++) {
                    const float *value = f->values + (size)f->nodes[at[l]].leaf * k;
                    double *total = totals + (r + l) * k;
                    for (size j = 0; j < k; j++)
                        total[j] += share * value[j];
                }
            }
        }
        for (size j = 0; j < rows * k; j++)
            f->out[begin * k + j] = (float)totals[j];
    }
    free(totals);
    free(padded);
}

#undef DOTS
#undef MOVE
