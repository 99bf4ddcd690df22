/* The greedy loop for one level of instructions; greedy.c includes it once for each.

       lists of datasets --> fill (this file) --> greedy.c

   LEVEL(name) names a function of the level, TARGET is its attribute; a VECTOR has LANES lags, a MASK says which. */

/* The largest lag at a position; the lags by the way, if there is room for them. */
TARGET INLINE double LEVEL(largest_lag)(const List *list, int64_t position, double *lag) {
    double n = factor(position);
    VECTOR many = *(VECTOR *)list->weight * n - *(VECTOR *)list->given;
    if (lag) *(VECTOR *)lag = many;
    for (int64_t at = LANES; at < list->items; at += LANES) {
        VECTOR lags = *(VECTOR *)(list->weight + at) * n - *(VECTOR *)(list->given + at);
        if (lag) *(VECTOR *)(lag + at) = lags;
        many = LEVEL(larger)(lags, many);
    }
    return LEVEL(largest)(many);
}

/* Make the list of a window: what can reach the threshold before its end; see [Note: window]. */
TARGET INLINE void LEVEL(list_window)(const List *above, List *list, int64_t begin, int64_t end, double threshold,
                                      const Blend *blend) {
    double n = (double)end, bound = threshold - (blend->largest * n + n) * 0x1p-48;
    double *weight = list->weight, *given = list->given;
    int64_t listed = 0, equal = 0, items = above->items, window = end - begin;
    for (int64_t first = 0; first < items; first += 64) {
        uint64_t word = 0;
        for (int64_t at = first; at < items && at < first + 64; at += LANES) {
            VECTOR lags = *(VECTOR *)(above->weight + at) * n - *(VECTOR *)(above->given + at);
            word |= LEVEL(bits)(LEVEL(reaches)(lags, bound)) << (at - first);
        }
        for (; word; word &= word - 1) {
            int64_t place = first + __builtin_ctzll(word);
            double w = above->weight[place], c = above->given[place];
            equal = listed && w == weight[listed - 1] && c == given[listed - 1] ? equal + 1 : 0;
            weight[listed] = w;
            given[listed] = c;
            list->above[listed] = (int16_t)place;
            listed += equal < window;
        }
    }
    for (; listed % PADDING; listed++) weight[listed] = 0, given[listed] = INFINITY;
    list->items = listed;
}

/* Give a position to a place of the near list; whether its dataset is used up by that. */
TARGET INLINE int LEVEL(take)(Blend *blend, int64_t place, int64_t position) {
    int64_t far_place = blend->near.above[place], number = blend->far.above[far_place];
    double given = blend->all.given[number] + 1.0;
    int used_up = blend->left && --blend->left[number] == 0;
    blend->dataset[position] = (int16_t)number;
    blend->sample[position] = (int64_t)blend->all.given[number];
    blend->all.given[number] = blend->far.given[far_place] = used_up ? INFINITY : given;
    return used_up;
}

/* Fill positions while the near list's largest lag reaches the threshold; the position behind the last. A list of few
   vectors stays in registers: the next position waits for what this one changes, and memory would be a detour of many
   cycles. */
TARGET INLINE int64_t LEVEL(fill_few)(Blend *blend, int64_t position, int64_t end, double threshold, int vectors) {
    List *near = &blend->near;
    VECTOR w[FEW_DATASETS / LANES], c[FEW_DATASETS / LANES], lag[FEW_DATASETS / LANES];
    for (int at = 0; at < vectors; at++) {
        w[at] = *(VECTOR *)(near->weight + at * LANES);
        c[at] = *(VECTOR *)(near->given + at * LANES);
    }
    for (; position < end; position++) {
        double n = factor(position);
        VECTOR many = lag[0] = w[0] * n - c[0];
        for (int at = 1; at < vectors; at++) {
            lag[at] = w[at] * n - c[at];
            many = LEVEL(larger)(lag[at], many);
        }
        double most = LEVEL(largest)(many);
        if (most < threshold) break;
        uint64_t same = 0;
        MASK equal[FEW_DATASETS / LANES];
        for (int at = 0; at < vectors; at++) {
            equal[at] = LEVEL(equal)(lag[at], most);
            same |= LEVEL(bits)(equal[at]) << at * LANES;
        }
        int place = __builtin_ctzll(same);
        if (__builtin_expect((same & (same - 1)) != 0, 0)) /* the first alone of several */
            for (int at = 0; at < vectors; at++) equal[at] = LEVEL(mask)((same & -same) >> at * LANES);
        for (int at = 0; at < vectors; at++) c[at] = LEVEL(count)(c[at], equal[at]);
        if (LEVEL(take)(blend, place, position)) {
            double given[FEW_DATASETS];
            for (int at = 0; at < vectors; at++) *(VECTOR *)(given + at * LANES) = c[at];
            given[place] = INFINITY;
            for (int at = 0; at < vectors; at++) c[at] = *(VECTOR *)(given + at * LANES);
        }
    }
    return position;
}

/* The same for any number of vectors, in memory. */
TARGET INLINE int64_t LEVEL(fill_many)(Blend *blend, int64_t position, int64_t end, double threshold) {
    List *near = &blend->near;
    for (; position < end; position++) {
        double most = LEVEL(largest_lag)(near, position, blend->lag);
        if (most < threshold) break;
        int64_t place = 0;
        while (blend->lag[place] != most) place++;
        near->given[place] = LEVEL(take)(blend, place, position) ? INFINITY : near->given[place] + 1.0;
    }
    return position;
}

TARGET INLINE int64_t LEVEL(fill_near)(Blend *blend, int64_t position, int64_t end, double threshold) {
    switch (blend->near.items) {
        case 8: return LEVEL(fill_few)(blend, position, end, threshold, 8 / LANES);
        case 16: return LEVEL(fill_few)(blend, position, end, threshold, 16 / LANES);
        case 24: return LEVEL(fill_few)(blend, position, end, threshold, 24 / LANES);
        case 32: return LEVEL(fill_few)(blend, position, end, threshold, 32 / LANES);
        case 40: return LEVEL(fill_few)(blend, position, end, threshold, 40 / LANES);
        default: return LEVEL(fill_many)(blend, position, end, threshold);
    }
}

/* The same for the far list, window by window. */
TARGET INLINE int64_t LEVEL(fill_far)(Blend *blend, int64_t position, int64_t end, double threshold) {
    while (position < end) {
        double most = LEVEL(largest_lag)(&blend->far, position, NULL), nearer = most - blend->near_margin;
        if (most < threshold) break;
        if (nearer < threshold) nearer = threshold;
        int64_t begin = position, stop = end - position > blend->near_window ? position + blend->near_window : end;
        LEVEL(list_window)(&blend->far, &blend->near, begin, stop, nearer, blend);
        position = LEVEL(fill_near)(blend, begin, stop, nearer);
        blend->near_margin *= position < stop ? 1.5 : 0.95;
    }
    return position;
}

/* The first position of a window is never below its threshold, so every window gives at least one. */
TARGET static void LEVEL(fill)(Blend *blend, int64_t size) {
    for (int64_t position = 0; position < size;) {
        double threshold = LEVEL(largest_lag)(&blend->all, position, NULL) - blend->far_margin;
        int64_t begin = position, stop = size - position > blend->far_window ? position + blend->far_window : size;
        LEVEL(list_window)(&blend->all, &blend->far, begin, stop, threshold, blend);
        position = LEVEL(fill_far)(blend, begin, stop, threshold);
        blend->far_margin *= position - begin < (stop - begin) / 2 ? 2 : 0.95;
    }
}

#undef LEVEL
#undef TARGET
#undef LANES
#undef VECTOR
#undef MASK
