/* The greedy loop for one level of instructions; greedy.c includes it once for each.

       lists of datasets, LEVEL, TARGET, LANES, VECTOR --> fill (this file) --> greedy.c */

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
TARGET INLINE void LEVEL(list_window)(
    const List *above, List *list, int64_t begin, int64_t end, double threshold, const Blend *blend) {
    const double *weight = above->weight, *given = above->given;
    uint8_t *flags = blend->flags;
    double n = (double)end, bound = threshold - (blend->largest * n + n) * 0x1p-48;
    for (int64_t at = 0; at < above->items; at++) flags[at] = weight[at] * n - given[at] >= bound;
    int64_t listed = 0, equal = 0;
    for (int64_t at = 0; at < above->items; at += 8) {
        uint64_t word;
        memcpy(&word, flags + at, sizeof word);
        for (; word; word &= word - 1) {
            int64_t place = at + __builtin_ctzll(word) / 8;
            double w = weight[place], c = given[place];
            equal = listed && w == list->weight[listed - 1] && c == list->given[listed - 1] ? equal + 1 : 0;
            list->weight[listed] = w;
            list->given[listed] = c;
            list->above[listed] = (int16_t)place;
            listed += equal < end - begin;
        }
    }
    for (; listed % PADDING; listed++) list->weight[listed] = 0, list->given[listed] = INFINITY;
    list->items = listed;
}

/* The first place with this lag: 64 of them at a time, since a branch at each would be guessed wrong. */
TARGET INLINE int64_t LEVEL(first_place)(const double *lag, double most, int64_t items) {
    for (int64_t begin = 0;; begin += 64) {
        uint64_t same = 0;
        int64_t some = items - begin < 64 ? items - begin : 64;
        for (int64_t at = 0; at < some; at += LANES)
            same |= LEVEL(equals)(*(const VECTOR *)(lag + begin + at), most) << at;
        if (same) return begin + __builtin_ctzll(same);
    }
}

/* Give a position to a place of the near list. */
TARGET INLINE void LEVEL(take)(Blend *blend, int64_t place, int64_t position) {
    static const double units[2 * LANES] = {[LANES] = 1.0}; /* a vector of them has the 1 in any one lane */
    List *all = &blend->all, *far = &blend->far, *near = &blend->near;
    int64_t far_place = near->above[place], number = far->above[far_place];
    double given = all->given[number] + 1.0;
    blend->dataset[position] = (int16_t)number;
    blend->sample[position] = (int64_t)all->given[number];
    if (blend->left && --blend->left[number] == 0) given = near->given[place] = INFINITY;
    all->given[number] = far->given[far_place] = given;
    VECTOR one; /* a whole vector: one that is stored in part and then read as a whole is slow */
    memcpy(&one, units + LANES - place % LANES, sizeof one);
    *(VECTOR *)(near->given + place / LANES * LANES) += one;
}

/* Fill positions while the near list's largest lag reaches the threshold; the position behind the last. */
TARGET INLINE int64_t LEVEL(fill_near)(Blend *blend, int64_t position, int64_t end, double threshold) {
    for (; position < end; position++) {
        double most = LEVEL(largest_lag)(&blend->near, position, blend->lag);
        if (most < threshold) break;
        LEVEL(take)(blend, LEVEL(first_place)(blend->lag, most, blend->near.items), position);
    }
    return position;
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
