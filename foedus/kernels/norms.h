/* Normalization by the statistics of a mini-batch (BatchNorm), and its derivative. Included by
   compiled.c, twice: see there. */

/* Adds to `sums` the sums over n numbers of y - middle and of (x - center) (y - middle). Four
   vectors at a time, because each addition waits for the previous one; the partial sums are added
   in double precision. */
ALWAYS void WIDE(add_run)(const float *x, const float *y, size n, float center, float middle,
                          double sums[2])
{
    enum { AT_ONCE = 4 };
    Vec level[AT_ONCE], product[AT_ONCE];
    float first = 0, second = 0;
    size i = 0;
    for (int v = 0; v < AT_ONCE; v++)
        level[v] = product[v] = (Vec){0};
    for (; i + AT_ONCE * LANES <= n; i += AT_ONCE * LANES)
        for (int v = 0; v < AT_ONCE; v++) {
            Vec a = *(const Vec *)(x + i + v * LANES) - center,
                b = *(const Vec *)(y + i + v * LANES) - middle;
            level[v] += b;
            product[v] += a * b;
        }
    for (; i < n; i++) {
        float a = x[i] - center, b = y[i] - middle;
        first += b, second += a * b;
    }
    Vec levels = (level[0] + level[1]) + (level[2] + level[3]),
        products = (product[0] + product[1]) + (product[2] + product[3]);
    sums[0] += first, sums[1] += second;
    for (int l = 0; l < LANES; l++)
        sums[0] += levels[l], sums[1] += products[l];
}

/* The results for a channel of a client: the statistics used, and the updated running
   statistics. */
ALWAYS void WIDE(keep_statistics)(const Norm *m, size at, float mean, float var, float unbiased)
{
    m->own_mean[at] = mean, m->own_var[at] = unbiased;
    m->inverse[at] = 1 / sqrtf((var > 0 ? var : 0) + m->eps);
    m->new_mean[at] = m->mean ? m->mean[at] + m->momentum * (mean - m->mean[at]) : mean;
    m->new_var[at] = m->var ? m->var[at] + m->momentum * (unbiased - m->var[at]) : unbiased;
}

/* One channel of one client, whose rows are runs of `n` numbers. */
ALWAYS void WIDE(normalize_channel)(const Norm *m, size client, size channel)
{
    size at = client * m->channels + channel, apart = m->channels * m->n,
         from = client * m->b * apart + channel * m->n;
    const float *x = m->x + from;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    if (m->several[client] > 1) {
        double count = (double)m->several[client], sums[2] = {0};
        size one = 0;
        while (real && !real[one])
            one++;
        WIDE(add_run)(x + one * apart, x + one * apart, m->n, x[one * apart], x[one * apart], sums);
        float center =
            (float)(x[one * apart] +
                    sums[0] / (double)m->n); /* the mean of one row, close to the mean of all */
        for (int again = 0; again < 2; again++) {
            sums[0] = sums[1] = 0;
            for (size r = 0; r < m->b; r++)
                if (!real || real[r])
                    WIDE(add_run)(x + r * apart, x + r * apart, m->n, center, center, sums);
            if (sums[0] * sums[0] <= count * sums[1] / 4)
                break;
            center =
                (float)(center +
                        sums[0] /
                            count); /* it was not close: digits of the variance would be lost */
        }
        double shift = sums[0] / count, square = sums[1] - sums[0] * shift;
        WIDE(keep_statistics)(m, at, (float)(center + shift), (float)(square / count),
                              (float)(square / (count - 1)));
    } else /* one value has no variance */
        WIDE(keep_statistics)(m, at, m->mean[at], m->var[at], m->var[at]);
    float mean = m->own_mean[at], scale = m->inverse[at] * (m->weight ? m->weight[at] : 1),
          shift = m->bias ? m->bias[at] : 0;
    for (size r = 0; r < m->b; r++) {
        const float *row = x + r * apart;
        float *out = m->out + from + r * apart;
        for (size i = 0; i < m->n; i++)
            out[i] = (row[i] - mean) * scale + shift;
    }
}

/* What the derivative of a channel needs from its sums: `level` and `tilt` of back_channel. */
ALWAYS void WIDE(keep_slopes)(const Norm *m, size client, size at, const double sums[2],
                              const double real_sums[2], float *level, float *tilt)
{
    float inverse = m->inverse[at];
    double count = (double)m->several[client];
    if (m->slope_weight)
        m->slope_weight[at] = (float)(sums[1] * inverse);
    if (m->slope_bias)
        m->slope_bias[at] = (float)sums[0];
    *level = count > 1 ? (float)(real_sums[0] / count) : 0;
    *tilt = count > 1 ? (float)(real_sums[1] * inverse / count) * inverse : 0;
}

/* Let s be the gradient in the output and h = (x - mean) inverse. The gradients are: sum s h in the
   weight, sum s in the bias, and weight inverse (s - (sum s + h sum s h) / count) in x, with sums
   over real rows; without the fraction if the statistics are not those of the mini-batch. */
ALWAYS void WIDE(back_channel)(const Norm *m, size client, size channel)
{
    size at = client * m->channels + channel, apart = m->channels * m->n,
         from = client * m->b * apart + channel * m->n;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    float mean = m->own_mean[at], scale = m->inverse[at] * (m->weight ? m->weight[at] : 1), level,
          tilt;
    double sums[2] = {0}, real_sums[2] = {0};
    for (size r = 0; r < m->b; r++) {
        double here[2] = {0};
        WIDE(add_run)(m->x + from + r * apart, m->slope + from + r * apart, m->n, mean, 0, here);
        for (int k = 0; k < 2; k++) {
            sums[k] += here[k];
            real_sums[k] += !real || real[r] ? here[k] : 0;
        }
    }
    WIDE(keep_slopes)(m, client, at, sums, real_sums, &level, &tilt);
    for (size r = 0; r < m->b; r++) {
        const float *row = m->x + from + r * apart, *slope = m->slope + from + r * apart;
        float *out = m->out + from + r * apart, own_level = !real || real[r] ? level : 0,
              own_tilt = !real || real[r] ? tilt : 0;
        for (size i = 0; i < m->n; i++)
            out[i] = scale * (slope[i] - own_level - own_tilt * (row[i] - mean));
    }
}

/* The same for channels of one number a row, which are adjacent in memory: SIDE_BY_SIDE of them
   from `first` on, or as many as are left. Sums are in double precision. */
ALWAYS void WIDE(normalize_vectors)(const Norm *m, size client, size first)
{
    size wide = m->channels - first < SIDE_BY_SIDE ? m->channels - first : SIDE_BY_SIDE,
         at = client * m->channels + first;
    const float *x = m->x + client * m->b * m->channels + first;
    float *out = m->out + client * m->b * m->channels + first, scale[SIDE_BY_SIDE],
          shift[SIDE_BY_SIDE];
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    double mean[SIDE_BY_SIDE] = {0}, square[SIDE_BY_SIDE] = {0}, count = (double)m->several[client];
    if (count > 1) {
        for (size r = 0; r < m->b; r++)
            for (size c = 0; (!real || real[r]) && c < wide; c++)
                mean[c] += x[r * m->channels + c];
        for (size c = 0; c < wide; c++)
            mean[c] /= count;
        for (size r = 0; r < m->b; r++)
            for (size c = 0; (!real || real[r]) && c < wide; c++) {
                double away = x[r * m->channels + c] - mean[c];
                square[c] += away * away;
            }
    }
    for (size c = 0; c < wide; c++) {
        if (count > 1)
            WIDE(keep_statistics)(m, at + c, (float)mean[c], (float)(square[c] / count),
                                  (float)(square[c] / (count - 1)));
        else
            WIDE(keep_statistics)(m, at + c, m->mean[at + c], m->var[at + c], m->var[at + c]);
        scale[c] = m->inverse[at + c] * (m->weight ? m->weight[at + c] : 1),
        shift[c] = m->bias ? m->bias[at + c] : 0;
    }
    for (size r = 0; r < m->b; r++)
        for (size c = 0; c < wide; c++)
            out[r * m->channels + c] =
                (x[r * m->channels + c] - m->own_mean[at + c]) * scale[c] + shift[c];
}

ALWAYS void WIDE(back_vectors)(const Norm *m, size client, size first)
{
    size wide = m->channels - first < SIDE_BY_SIDE ? m->channels - first : SIDE_BY_SIDE,
         at = client * m->channels + first;
    size from = client * m->b * m->channels + first;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    const float *mean = m->own_mean + at;
    double sum[SIDE_BY_SIDE] = {0}, product[SIDE_BY_SIDE] = {0}, real_sum[SIDE_BY_SIDE] = {0},
           real_product[SIDE_BY_SIDE] = {0};
    float scale[SIDE_BY_SIDE], level[SIDE_BY_SIDE], tilt[SIDE_BY_SIDE];
    for (size r = 0; r < m->b; r++) {
        const float *x = m->x + from + r * m->channels, *slope = m->slope + from + r * m->channels;
        double counts = !real || real[r];
        for (size c = 0; c < wide; c++) {
            double s = slope[c], h = s * (x[c] - mean[c]);
            sum[c] += s, product[c] += h;
            real_sum[c] += counts * s, real_product[c] += counts * h;
        }
    }
    for (size c = 0; c < wide; c++) {
        double sums[2] = {sum[c], product[c]}, real_sums[2] = {real_sum[c], real_product[c]};
        WIDE(keep_slopes)(m, client, at + c, sums, real_sums, level + c, tilt + c);
        scale[c] = m->inverse[at + c] * (m->weight ? m->weight[at + c] : 1);
    }
    for (size r = 0; r < m->b; r++) {
        const float *x = m->x + from + r * m->channels, *slope = m->slope + from + r * m->channels;
        float *out = m->out + from + r * m->channels, counts = !real || real[r];
        for (size c = 0; c < wide; c++)
            out[c] = scale[c] * (slope[c] - counts * (level[c] + tilt[c] * (x[c] - mean[c])));
    }
}

/* Pieces first .. last - 1: each is a channel of a client, or several adjacent channels of a
   client. */
static void WIDE(normalize_some)(void *about, size first, size last)
{
    const Norm *m = about;
    size each = pieces_of(m);
    for (size piece = first; piece < last; piece++) {
        size client = piece / each, at = piece % each;
        if (m->n == 1 && m->slope)
            WIDE(back_vectors)(m, client, at * SIDE_BY_SIDE);
        else if (m->n == 1)
            WIDE(normalize_vectors)(m, client, at * SIDE_BY_SIDE);
        else if (m->slope)
            WIDE(back_channel)(m, client, at);
        else
            WIDE(normalize_channel)(m, client, at);
    }
}
