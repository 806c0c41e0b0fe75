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

/* Where a row has one number of each channel: up to SIDE channels at once. */
ALWAYS void WIDE(normalize_columns)(const Norm *m, size client, size first, size many)
{
    size c = m->channels, at = client * c + first;
    const float *x = m->x + client * m->b * c + first;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    float mean[SIDE], scale[SIDE], shift[SIDE], total[SIDE] = {0}, square[SIDE] = {0}, count = (float)m->several[client];
    if (count > 1) {
        size one = 0;
        while (real && !real[one])
            one++;
        const float *center = x + one * c;
        for (size r = 0; r < m->b; r++)
            if (!real || real[r])
                for (size j = 0; j < many; j++)
                    total[j] += x[r * c + j] - center[j];
        for (size j = 0; j < many; j++)
            mean[j] = center[j] + total[j] / count;
        for (size r = 0; r < m->b; r++)
            if (!real || real[r])
                for (size j = 0; j < many; j++)
                    square[j] += (x[r * c + j] - mean[j]) * (x[r * c + j] - mean[j]);
    }
    for (size j = 0; j < many; j++) {
        float var = count > 1 ? square[j] / count : m->var[at + j];
        m->own_mean[at + j] = mean[j] = count > 1 ? mean[j] : m->mean[at + j];
        m->own_var[at + j] = count > 1 ? square[j] / (count - 1) : var;
        m->inverse[at + j] = scale[j] = 1 / sqrtf((var > 0 ? var : 0) + m->eps);
        scale[j] *= m->weight ? m->weight[at + j] : 1;
        shift[j] = m->bias ? m->bias[at + j] : 0;
    }
    for (size r = 0; r < m->b; r++) {
        float *out = m->out + (client * m->b + r) * c + first;
        for (size j = 0; j < many; j++)
            out[j] = (x[r * c + j] - mean[j]) * scale[j] + shift[j];
    }
}

ALWAYS void WIDE(back_columns)(const Norm *m, size client, size first, size many)
{
    size c = m->channels, at = client * c + first;
    const float *x = m->x + client * m->b * c + first, *slope = m->slope + client * m->b * c + first;
    const uint8_t *real = m->real ? m->real + client * m->b : NULL;
    float sum[SIDE] = {0}, product[SIDE] = {0}, real_sum[SIDE] = {0}, real_product[SIDE] = {0}, scale[SIDE], count = (float)m->several[client];
    const float *mean = m->own_mean + at, *inverse = m->inverse + at;
    for (size r = 0; r < m->b; r++) {
        float one = !real || real[r];
        for (size j = 0; j < many; j++) {
            float s = slope[r * c + j], with = s * (x[r * c + j] - mean[j]);
            sum[j] += s, product[j] += with;
            real_sum[j] += one * s, real_product[j] += one * with;
        }
    }
    for (size j = 0; j < many; j++) {
        if (m->slope_weight)
            m->slope_weight[at + j] = product[j] * inverse[j];
        if (m->slope_bias)
            m->slope_bias[at + j] = sum[j];
        scale[j] = m->weight ? inverse[j] * m->weight[at + j] : inverse[j];
        real_sum[j] = count > 1 ? real_sum[j] / count : 0;
        real_product[j] = count > 1 ? real_product[j] * inverse[j] * inverse[j] / count : 0;
    }
    for (size r = 0; r < m->b; r++) {
        float *out = m->out + (client * m->b + r) * c + first, one = !real || real[r];
        for (size j = 0; j < many; j++)
            out[j] = scale[j] * (slope[r * c + j] - one * (real_sum[j] + real_product[j] * (x[r * c + j] - mean[j])));
    }
}

/* Pieces first .. last - 1 of all clients: a channel each, or SIDE of them where a row has one number of each. */
static void WIDE(normalize_some)(void *about, size first, size last)
{
    const Norm *m = about;
    size side = m->n == 1 ? SIDE : 1, pieces = (m->channels + side - 1) / side;
    for (size piece = first; piece < last; piece++) {
        size client = piece / pieces, channel = piece % pieces * side;
        size many = m->channels - channel < side ? m->channels - channel : side;
        if (m->n == 1 && m->slope)
            WIDE(back_columns)(m, client, channel, many);
        else if (m->n == 1)
            WIDE(normalize_columns)(m, client, channel, many);
        else if (m->slope)
            WIDE(back_channel)(m, client, channel);
        else
            WIDE(normalize_channel)(m, client, channel);
    }
}
