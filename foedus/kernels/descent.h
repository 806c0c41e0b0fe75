/* Training of linear models and of fully connected networks. Included by compiled.c, twice: see
   there. */

/* z[r][j] = <x_r, w_j> for R rows and J outputs; R and J are constants, so that all sums stay in
   registers. */
ALWAYS void WIDE(dots)(const float **x, const float *w, size d, float *z, size k, const int R,
                       const int J)
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
    if (i < d && d >= LANES) { /* the last vector, without the columns that have been added */
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

/* Outputs of the model for n rows; meanwhile the next rows are prefetched. */
ALWAYS void WIDE(outputs)(const float **rows, size n, const float **next, size n_next,
                          const float *weight, const float *bias, size d, size k, float *out)
{
    for (size r = 0; r < n; r += 3) {
        for (size l = r; l < r + 3 && l < n_next; l++)
            for (size i = 0; i < d; i += 16)
                __builtin_prefetch(next[l] + i);
        for (size j = 0; j < k; j += 4) {
            const float **x = rows + r, *w = weight + j * d;
            float *z = out + r * k + j;
            switch ((n - r < 3 ? n - r : 3) * 8 + (k - j < 4 ? k - j : 4)) {
                DOTS(3, 4) DOTS(3, 3) DOTS(3, 2) DOTS(3, 1) DOTS(2, 4) DOTS(2, 3)
                DOTS(2, 2) DOTS(2, 1) DOTS(1, 4) DOTS(1, 3) DOTS(1, 2) DOTS(1, 1)
            }
        }
    }
    if (bias)
        for (size r = 0; r < n; r++)
            for (size j = 0; j < k; j++)
                out[r * k + j] += bias[j];
}

/* Sixteen columns of w_j <- keep w_j + sum_r slope[r][j] x_r, for J outputs; the first `skip` of
   them are done already. */
ALWAYS void WIDE(columns)(const float **x, size n, float *w, size d, const float *slope, size k,
                          float keep, size i, int32_t skip, const int J)
{
    Mask first = COLUMNS >= skip, second = COLUMNS >= skip - LANES;
    Vec low[5], high[5], keep_low, keep_high;
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

ALWAYS void WIDE(move)(const float **x, size n, float *w, size d, const float *slope, size k,
                       float keep, const int J)
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

#define MOVE(J)                                                                            \
    case J:                                                                                \
        WIDE(move)(x + r, rows, weight + j * d, d, slope + r * k + j, k, r ? 1 : keep, J); \
        break;

/* W <- keep W + slope^T X, for at most as many rows at a time as fit into the cache. */
ALWAYS void WIDE(moves)(const float **x, size n, float *weight, size d, const float *slope, size k,
                        float keep)
{
    size blocks = (k + 4) / 5; /* blocks of about equal size */
    for (size r = 0; r == 0 || r < n; r += ROWS) {
        size rows = n - r < ROWS ? n - r : ROWS;
        for (size block = 0; block < blocks; block++) {
            size j = k * block / blocks;
            switch (k * (block + 1) / blocks - j) {
                MOVE(1) MOVE(2) MOVE(3) MOVE(4) MOVE(5)
            }
        }
    }
}

/* exp(z) of n numbers, clamped to [e^-87, e^88], within a few units in the last place; memory for
   up to seven more numbers is written. 2^m times seven terms of the series at the remainder, which
   is at most half of log 2. NaNs propagate. */
ALWAYS void WIDE(exps)(float *z, size n)
{
    const float half = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in low bits */
    for (size i = 0; i < n; i += LANES) {
        Vec x = *(Vec *)(z + i), least = (Vec){0} - 87.0f, most = (Vec){0} + 88.0f;
        Mask below = x < least, above = x > most;
        x = (Vec)(((Mask)x & ~(below | above)) | ((Mask)least & below) | ((Mask)most & above));
        Vec shifted = x * 1.44269504f + half, m = shifted - half;
        Vec r = x - m * 0.693359375f + m * 2.12194440e-4f;
        Vec high = 1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r * (1 / 5040.f)));
        Vec sum = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * high)));
        *(Vec *)(z + i) = sum * (Vec)(((Mask)shifted << 23) + 0x3F800000);
    }
}

/* From the outputs z for the rows of a step to -lr share times the derivatives of their losses. */
ALWAYS void WIDE(slopes)(const Training *m, size step, size n, float *z)
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

/* The rows of a step; rows of weight 0 are padding. An index or a label out of range is an
   error. */
ALWAYS size WIDE(rows_of)(Training *m, size step, const float **x)
{
    size n = 0;
    for (size i = step * m->b; i < (step + 1) * m->b; i++) {
        if (m->shares[i] == 0)
            continue;
        if (m->used[i] < 0 || m->used[i] >= m->rows ||
            (m->labels && (m->labels[m->used[i]] < 0 || m->labels[m->used[i]] >= m->k))) {
            m->failed = NO_SUCH_ROW;
            return 0;
        }
        x[n++] = m->x + m->used[i] * m->d;
    }
    return n;
}

/* One step of a linear model on n rows. */
ALWAYS void WIDE(linear_step)(const Training *m, size client, size step, const float **now, size n,
                              const float **next, size n_next, float *z)
{
    const Layer *layer = &m->layer[0];
    size d = m->d, k = m->k;
    float *weight = layer->weight + client * k * d,
          *bias = layer->bias ? layer->bias + client * k : NULL;
    WIDE(outputs)(now, n, next, n_next, weight, bias, d, k, z);
    WIDE(slopes)(m, step, n, z);
    WIDE(moves)(now, n, weight, d, z, k, m->keep);
    if (layer->more_weight)
        for (size j = 0; j < k * d; j++)
            weight[j] -= m->lr * layer->more_weight[client * k * d + j];
    if (bias)
        for (size j = 0; j < k; j++) {
            float total = bias[j] * m->keep -
                          (layer->more_bias ? m->lr * layer->more_bias[client * k + j] : 0);
            for (size r = 0; r < n; r++)
                total += z[r * k + j];
            bias[j] = total;
        }
}

/* -- layers: tile[t][i] = W[16 t .. 16 t + 15][i], filled up with zeros ------------------------ */

/* out[r] = start + sum_i x_r[i] tile[i] for R rows. */
ALWAYS void WIDE(through)(const float **x, const float *tile, size d, const float *start,
                          float *out, size stride, const int R)
{
    Vec low[6], high[6];
    for (int r = 0; r < R; r++) {
        low[r] = *(const Vec *)start;
        high[r] = *(const Vec *)(start + LANES);
    }
    for (size i = 0; i < d; i++) {
        Vec a = *(const Vec *)(tile + i * TILE), b = *(const Vec *)(tile + i * TILE + LANES);
        for (int r = 0; r < R; r++) {
            low[r] += a * x[r][i];
            high[r] += b * x[r][i];
        }
    }
    for (int r = 0; r < R; r++) {
        *(Vec *)(out + r * stride) = low[r];
        *(Vec *)(out + r * stride + LANES) = high[r];
    }
}

#define THROUGH(R)                                                                                 \
    case R:                                                                                        \
        WIDE(through)(x + r, sheet->weight + t * d * TILE, d, sheet->bias + t * TILE, out, stride, \
                      R);                                                                          \
        break;

/* Outputs of a layer for n rows, before ReLU; meanwhile the next rows are prefetched. */
ALWAYS void WIDE(say)(const Sheet *sheet, const float **x, size n, size d, const float **next,
                      size n_next)
{
    size stride = sheet->tiles * TILE;
    for (size t = 0; t < sheet->tiles; t++)
        for (size r = 0; r < n; r += 6) {
            float *out = sheet->said + r * stride + t * TILE;
            for (size l = r; t == 0 && l < r + 6 && l < n_next; l++)
                for (size i = 0; i < d; i += 16)
                    __builtin_prefetch(next[l] + i);
            switch (n - r < 6 ? n - r : 6) {
                THROUGH(6) THROUGH(5) THROUGH(4) THROUGH(3) THROUGH(2) THROUGH(1)
            }
        }
}

/* tile[i] <- keep tile[i] + sum_r x_r[i] slope[r] for I inputs, beginning with i. */
ALWAYS void WIDE(learn)(const float **x, size n, size i, float *tile, const float *slope,
                        size stride, float keep, const int I)
{
    Vec low[5], high[5];
    for (int l = 0; l < I; l++) {
        low[l] = *(Vec *)(tile + l * TILE) * keep;
        high[l] = *(Vec *)(tile + l * TILE + LANES) * keep;
    }
    for (size r = 0; r < n; r++) {
        Vec a = *(const Vec *)(slope + r * stride), b = *(const Vec *)(slope + r * stride + LANES);
        for (int l = 0; l < I; l++) {
            low[l] += a * x[r][i + l];
            high[l] += b * x[r][i + l];
        }
    }
    for (int l = 0; l < I; l++) {
        *(Vec *)(tile + l * TILE) = low[l];
        *(Vec *)(tile + l * TILE + LANES) = high[l];
    }
}

#define LEARN(I)                                                                       \
    case I:                                                                            \
        WIDE(learn)(x + r, rows, i, sheet->weight + (t * d + i) * TILE,                \
                    sheet->slope + r * stride + t * TILE, stride, r ? 1 : m->keep, I); \
        break;

/* W <- keep W + slope^T X - lr more, and the bias, if there is one, likewise. */
ALWAYS void WIDE(learn_all)(const Training *m, const Layer *layer, const Sheet *sheet,
                            const float **x, size n)
{
    size d = layer->in, stride = sheet->tiles * TILE;
    for (size r = 0; r == 0 || r < n; r += ROWS) {
        size rows = n - r < ROWS ? n - r : ROWS;
        for (size t = 0; t < sheet->tiles; t++)
            for (size i = 0; i < d; i += 5)
                switch (d - i < 5 ? d - i : 5) {
                    LEARN(5) LEARN(4) LEARN(3) LEARN(2) LEARN(1)
                }
    }
    for (size j = 0; layer->bias && j < stride; j++)
        sheet->bias[j] = sheet->bias[j] * m->keep - m->lr * sheet->more_bias[j];
    for (size r = 0; layer->bias && r < n; r++)
        for (size j = 0; j < stride; j++)
            sheet->bias[j] += sheet->slope[r * stride + j];
    if (sheet->more)
        for (size j = 0; j < d * stride; j++)
            sheet->weight[j] -= m->lr * sheet->more[j];
}

/* out[r][i] = <slope_r, W[:, i]> for R rows and I inputs. */
ALWAYS void WIDE(back)(const float *slope, size stride, const float *tile, size d, float *out,
                       size out_stride, const int R, const int I)
{
    Vec sums[3][4];
    for (int r = 0; r < R; r++)
        for (int l = 0; l < I; l++)
            sums[r][l] = (Vec){0};
    for (size j = 0; j < stride; j += LANES)
        for (int l = 0; l < I; l++) {
            Vec w = *(const Vec *)(tile + (j / TILE * d + l) * TILE + j % TILE);
            for (int r = 0; r < R; r++)
                sums[r][l] += *(const Vec *)(slope + r * stride + j) * w;
        }
    for (int r = 0; r < R; r++)
        for (int l = 0; l < I; l++) {
            Vec s = sums[r][l];
            out[r * out_stride + l] =
                ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        }
}

#define BACK(R, I)                                                                      \
    case R * 8 + I:                                                                     \
        WIDE(back)(above->slope + r * stride, stride, above->weight + i * TILE, d, out, \
                   below_stride, R, I);                                                 \
        break;

/* The gradient in the inputs of the layer above, d numbers a row, from that in its outputs. */
ALWAYS void WIDE(pass_back)(const Sheet *above, const Sheet *below, size n, size d)
{
    size stride = above->tiles * TILE, below_stride = below->tiles * TILE;
    for (size r = 0; r < n; r += 3)
        for (size i = 0; i < d; i += 4) {
            float *out = below->slope + r * below_stride + i;
            switch ((n - r < 3 ? n - r : 3) * 8 + (d - i < 4 ? d - i : 4)) {
                BACK(3, 4)
                BACK(3, 3) BACK(3, 2) BACK(3, 1) BACK(2, 4) BACK(2, 3) BACK(2, 2) BACK(2, 1)
                    BACK(1, 4) BACK(1, 3) BACK(1, 2) BACK(1, 1)
            }
        }
}

/* The normalization of a layer's outputs on n rows, or with `back` its derivative. */
ALWAYS Norm WIDE(norm_of)(const Layer *layer, const Sheet *sheet, size n, const int64_t *several,
                          int back)
{
    float *const *v = sheet->norm;
    Norm m = {.clients = 1, .b = n, .channels = sheet->tiles * TILE, .n = 1, .several = several};
    m.eps = layer->eps, m.momentum = layer->momentum, m.x = sheet->said;
    m.out = back ? sheet->slope : sheet->normal, m.slope = back ? sheet->slope : NULL;
    m.weight = layer->scale ? v[SCALE] : NULL, m.bias = layer->shift ? v[SHIFT] : NULL;
    m.mean = v[MEAN], m.var = v[VAR], m.own_mean = v[OWN_MEAN], m.own_var = v[OWN_VAR];
    m.inverse = v[INVERSE], m.new_mean = v[NEW_MEAN], m.new_var = v[NEW_VAR];
    m.slope_weight = v[SLOPE_SCALE], m.slope_bias = v[SLOPE_SHIFT];
    return m;
}

ALWAYS void WIDE(normalize_layer)(const Layer *layer, const Sheet *sheet, size n)
{
    int64_t several = layer->fixed ? 0 : n;
    Norm m = WIDE(norm_of)(layer, sheet, n, &several, 0);
    for (size first = 0; first < m.channels; first += SIDE_BY_SIDE)
        WIDE(normalize_vectors)(&m, 0, first);
    for (size j = 0; j < m.channels && several > 1; j++)
        sheet->norm[MEAN][j] = m.new_mean[j], sheet->norm[VAR][j] = m.new_var[j];
}

/* The gradient in the layer's outputs from that in the normalized outputs, in place; and the step
   of scale and shift. */
ALWAYS void WIDE(normalize_layer_back)(const Training *t, const Layer *layer, const Sheet *sheet,
                                       size n)
{
    int64_t several = layer->fixed ? 0 : n;
    Norm m = WIDE(norm_of)(layer, sheet, n, &several, 1);
    for (size first = 0; first < m.channels; first += SIDE_BY_SIDE)
        WIDE(back_vectors)(&m, 0, first);
    float *const *v = sheet->norm;
    for (size j = 0; j < layer->out; j++) {
        v[SCALE][j] = v[SCALE][j] * t->keep - t->lr * v[MORE_SCALE][j] + v[SLOPE_SCALE][j];
        v[SHIFT][j] = v[SHIFT][j] * t->keep - t->lr * v[MORE_SHIFT][j] + v[SLOPE_SHIFT][j];
    }
}

/* The mask of a layer in a step: the row at place r of a mini-batch takes the 16-bit halves of
   words from number r * out on. */
ALWAYS void WIDE(draw_mask)(const Training *m, const Layer *layer, const Sheet *sheet, size step,
                            int64_t *words)
{
    size out = layer->out, width = sheet->tiles * TILE, row = 0;
    first_words(words, (m->b * out + 1) / 2, layer->keys + 2 * step);
    for (size place = 0; place < m->b; place++) {
        if (m->shares[step * m->b + place] == 0)
            continue;
        float *mask = sheet->mask + width * row++;
        for (size j = 0, half = place * out; j < out; j++, half++) {
            unsigned bits = (uint64_t)words[half / 2] >> half % 2 * 16 & 0xFFFF;
            mask[j] = bits >= layer->dropped ? layer->kept : 0;
        }
    }
}

/* The operations after a layer, on its outputs for n rows. */
ALWAYS void WIDE(follow)(const Training *m, const Layer *layer, const Sheet *sheet, size step,
                         size n, int64_t *words)
{
    size count = n * sheet->tiles * TILE;
    float *now = sheet->said;
    for (int i = 0; i < MOST_STEPS; i++)
        switch (layer->steps[i]) {
        case NORMALIZE:
            WIDE(normalize_layer)(layer, sheet, n);
            now = sheet->normal;
            break;
        case RELU:
            for (size j = 0; j < count; j++)
                now[j] = now[j] < 0 ? 0 : now[j];
            break;
        case DROPOUT:
            WIDE(draw_mask)(m, layer, sheet, step, words);
            for (size j = 0; j < count; j++)
                now[j] *= sheet->mask[j];
        }
}

/* The gradient in the layer's outputs from that in the inputs of the next layer, in place. */
ALWAYS void WIDE(follow_back)(const Training *m, const Layer *layer, const Sheet *sheet, size n)
{
    size count = n * sheet->tiles * TILE;
    float *slope = sheet->slope;
    const float *now = sheet->normal;
    for (int i = MOST_STEPS - 1; i >= 0; i--)
        switch (layer->steps[i]) {
        case NORMALIZE:
            WIDE(normalize_layer_back)(m, layer, sheet, n);
            now = sheet->said;
            break;
        case RELU: /* dropped numbers are 0, too */
            for (size j = 0; j < count; j++)
                slope[j] = now[j] <= 0 ? 0 : slope[j];
            break;
        case DROPOUT:
            for (size j = 0; j < count; j++)
                slope[j] *= sheet->mask[j];
        }
}

/* One step of a network on n rows. */
ALWAYS void WIDE(net_step)(const Training *m, const Sheet *sheets, size step, const float **now,
                           size n, const float **next, size n_next, float *z, int64_t *words)
{
    int last = m->layers - 1;
    for (int l = 0; l <= last; l++) {
        const Sheet *sheet = &sheets[l];
        WIDE(say)(sheet, l ? sheets[l - 1].rows : now, n, m->layer[l].in, next, l ? 0 : n_next);
        WIDE(follow)(m, &m->layer[l], sheet, step, n, words);
    }
    const Sheet *top = &sheets[last];
    size stride = top->tiles * TILE, k = m->k;
    for (size r = 0; r < n; r++)
        memcpy(z + r * k, top->said + r * stride, (size_t)k * sizeof *z);
    WIDE(slopes)(m, step, n, z);
    for (size r = 0; r < n; r++)
        memcpy(top->slope + r * stride, z + r * k,
               (size_t)k * sizeof *z); /* padding beyond the outputs is 0, and stays 0 */
    for (int l = last; l >= 0; l--) {
        if (l) {
            WIDE(pass_back)(&sheets[l], &sheets[l - 1], n, m->layer[l].in);
            WIDE(follow_back)(m, &m->layer[l - 1], &sheets[l - 1], n);
        }
        WIDE(learn_all)(m, &m->layer[l], &sheets[l], l ? sheets[l - 1].rows : now, n);
    }
}

/* Copy a client's scale, shift and statistics to the vectors of its layer, and back. */
ALWAYS void WIDE(lay_out_norm)(const Layer *layer, const Sheet *sheet, size client, int back)
{
    float *theirs[] = {layer->scale, layer->shift, layer->mean, layer->var};
    const float *more[] = {layer->more_scale, layer->more_shift};
    size out = layer->out, bytes = out * sizeof(float);
    for (int v = SCALE; v <= VAR; v++)
        if (theirs[v])
            memcpy(back ? theirs[v] + client * out : sheet->norm[v],
                   back ? sheet->norm[v] : theirs[v] + client * out, bytes);
    for (int v = 0; v < 2; v++)
        if (more[v] && !back)
            memcpy(sheet->norm[MORE_SCALE + v], more[v] + client * out, bytes);
}

/* Copy a client's layers to tiles, and back. */
static void WIDE(lay_out)(const Training *m, const Sheet *sheets, size client, int back)
{
    for (int l = 0; l < m->layers; l++) {
        const Layer *layer = &m->layer[l];
        const Sheet *sheet = &sheets[l];
        size in = layer->in, out = layer->out;
        float *weight = layer->weight + client * in * out,
              *bias = layer->bias ? layer->bias + client * out : NULL;
        const float *more = layer->more_weight ? layer->more_weight + client * in * out : NULL;
        for (size first = 0; first < in; first += TILE) /* blocks of sixteen by sixteen */
            for (size j = 0; j < out; j++)
                for (size i = first; i < in && i < first + TILE; i++) {
                    size there = (j / TILE * in + i) * TILE + j % TILE;
                    if (back)
                        weight[j * in + i] = sheet->weight[there];
                    else
                        sheet->weight[there] = weight[j * in + i];
                    if (more && !back)
                        sheet->more[there] = more[j * in + i];
                }
        for (size j = 0; bias && j < out; j++) {
            if (back)
                bias[j] = sheet->bias[j];
            else
                sheet->bias[j] = bias[j];
            sheet->more_bias[j] = layer->more_bias ? layer->more_bias[client * out + j] : 0;
        }
        if (has_step(layer, NORMALIZE))
            WIDE(lay_out_norm)(layer, sheet, client, back);
    }
}

/* All steps of a range of clients, one client after the other, so that its weights stay in
   cache. */
static void WIDE(train_some)(void *about, size first, size last)
{
    Training *m = about;
    Sheet sheets[MOST_LAYERS];
    const float **now = malloc(2 * (size_t)m->b * sizeof *now), **next = now + m->b;
    float *z = malloc((size_t)(m->b * m->k + LANES) * sizeof *z);
    void *room = m->layers > 1 ? sheets_for(m, sheets) : NULL;
    size widest = 0;
    for (int l = 0; l < m->layers; l++)
        if (has_step(&m->layer[l], DROPOUT) && m->layer[l].out > widest)
            widest = m->layer[l].out;
    int64_t *words = malloc((size_t)(m->b * widest / 2 + 1) * sizeof *words);
    if (now == NULL || z == NULL || words == NULL || (m->layers > 1 && room == NULL))
        m->failed = NO_MEMORY;
    size n_next = m->failed ? 0 : WIDE(rows_of)(m, first, next);
    for (size i = first; i < last && !m->failed; i++) {
        if (room)
            WIDE(lay_out)(m, sheets, i, 0);
        for (size t = 0; t < m->steps[i] && !m->failed; t++) {
            size step = t * m->clients + i, n = n_next;
            const float **swap = now;
            now = next, next = swap;
            n_next = t + 1 < m->steps[i] ? WIDE(rows_of)(m, step + m->clients, next)
                     : i + 1 < last      ? WIDE(rows_of)(m, i + 1, next)
                                         : 0;
            if (room)
                WIDE(net_step)(m, sheets, step, now, n, next, n_next, z, words);
            else
                WIDE(linear_step)(m, i, step, now, n, next, n_next, z);
        }
        if (room)
            WIDE(lay_out)(m, sheets, i, 1);
    }
    free(now < next ? now : next);
    free(z);
    free(words);
    free(room);
}

#undef DOTS
#undef MOVE
#undef THROUGH
#undef LEARN
#undef BACK
