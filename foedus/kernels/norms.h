/* Normalization by the statistics of a mini-batch (BatchNorm), and its derivative. Included by compiled.c, twice: see there. */

/* Sums over a run of n numbers, in eight parts that are added in double precision: of x - center, and of the product of that with y - middle. */
ALWAYS double WIDE(sum_run)(const float *x, size n, float center)
{
    float part[8] = {0};
    double total = 0;
    size i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            part[l] += x[i + l] - center;
    for (; i < n; i++)
        part[0] += x[i] - center;
    for (int l = 0; l < 8; l++)
        total += part[l];
    return total;
}

ALWAYS double WIDE(dot_run)(const float *x, const float *y, size n, float center, float middle)
{
    float part[8] = {0};
    double total = 0;
    size i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            part[l] += (x[i + l] - center) * (y[i + l] - middle);
    for (; i < n; i++)
        part[0] += (x[i] - center) * (y[i] - middle);
    for (int l = 0; l < 8; l++)
        total += part[l];
    return total;
}

/* One channel of one client, whose rows are runs of `n` numbers. */
ALWAYS void WIDE(normalize_channel)(const Norm *m, size client, size channel)
{
    size at = client * m->channels + channel, apart = m->channels * m->n, from = client * m->b * apart + channel * m->n;
    const float *x = m->x + from;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    float mean, var;
    if (m->several[client] > 1) {
        double count = (double)m->several[client], total = 0, square = 0;
        size one = 0;
        while (real && !real[one])
            one++;
        float center = x[one * apart]; /* sums of what is left are small, and lose less */
        for (size r = 0; r < m->b; r++)
            if (!real || real[r])
                total += WIDE(sum_run)(x + r * apart, m->n, center);
        mean = (float)(center + total / count);
        for (size r = 0; r < m->b; r++)
            if (!real || real[r])
                square += WIDE(dot_run)(x + r * apart, x + r * apart, m->n, mean, mean);
        var = (float)(square / count);
        m->own_var[at] = (float)(square / (count - 1));
    } else /* one value has no variance */
        mean = m->mean[at], m->own_var[at] = var = m->var[at];
    m->own_mean[at] = mean;
    float inverse = 1 / sqrtf((var > 0 ? var : 0) + m->eps);
    float scale = m->weight ? inverse * m->weight[at] : inverse, shift = m->bias ? m->bias[at] : 0;
    m->inverse[at] = inverse;
    for (size r = 0; r < m->b; r++) {
        const float *row = x + r * apart;
        float *out = m->out + from + r * apart;
        for (size i = 0; i < m->n; i++)
            out[i] = (row[i] - mean) * scale + shift;
    }
}

/* With s the slope in the output and h = (x - mean) inverse: slopes sum s h in the weight, sum s in the bias, and in x
   weight inverse (s - (sum s + h sum s h) / count), sums over real rows; without the fraction where the statistics are not the mini-batch's. */
ALWAYS void WIDE(back_channel)(const Norm *m, size client, size channel)
{
    size at = client * m->channels + channel, apart = m->channels * m->n, from = client * m->b * apart + channel * m->n;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    float mean = m->own_mean[at], inverse = m->inverse[at], scale = m->weight ? inverse * m->weight[at] : inverse;
    double sum = 0, product = 0, real_sum = 0, real_product = 0;
    for (size r = 0; r < m->b; r++) {
        const float *row = m->x + from + r * apart, *slope = m->slope + from + r * apart;
        double here = WIDE(sum_run)(slope, m->n, 0), with = WIDE(dot_run)(row, slope, m->n, mean, 0) * inverse;
        sum += here, product += with;
        if (!real || real[r])
            real_sum += here, real_product += with;
    }
    if (m->slope_weight)
        m->slope_weight[at] = (float)product;
    if (m->slope_bias)
        m->slope_bias[at] = (float)sum;
    double count = (double)m->several[client];
    float level = count > 1 ? (float)(real_sum / count) : 0, tilt = count > 1 ? (float)(real_product / count) * inverse : 0;
    for (size r = 0; r < m->b; r++) {
        const float *row = m->x + from + r * apart, *slope = m->slope + from + r * apart;
        float *out = m->out + from + r * apart, own_level = !real || real[r] ? level : 0, own_tilt = !real || real[r] ? tilt : 0;
        for (size i = 0; i < m->n; i++)
            out[i] = scale * (slope[i] - own_level - own_tilt * (row[i] - mean));
    }
}

/* Pieces first .. last - 1: a channel of a client each. */
static void WIDE(normalize_some)(void *about, size first, size last)
{
    const Norm *m = about;
    for (size piece = first; piece < last; piece++) {
        if (m->slope)
            WIDE(back_channel)(m, piece / m->channels, piece % m->channels);
        else
            WIDE(normalize_channel)(m, piece / m->channels, piece % m->channels);
    }
}
