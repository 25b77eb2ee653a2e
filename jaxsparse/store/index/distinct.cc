// SPDX-License-Identifier: Apache-2.0
// Distinct rows of a batch in one pass, with an array of marks by row.
#include <algorithm>
#include <cstdint>

// marks [largest row + 1]: anything at first, kept from call to call. The mark of a row is trusted
// only where the distinct row it points to is that row, so that no call has to clear what an
// earlier one left.
// Results: inverse [n] (-1 for rows of -1), distinct and counts with room for n.
// Returns how many distinct rows there are.
extern "C" int64_t jaxsparse_index_distinct_rows(const int32_t* rows, int64_t n, int32_t* marks,
                                                 int32_t* distinct, int32_t* inverse,
                                                 int32_t* counts) {
  constexpr int64_t kAhead = 32;
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&marks[std::max(rows[i + kAhead], 0)], 1);
    const int32_t row = rows[i];
    if (row < 0) {
      inverse[i] = -1;
      continue;
    }
    const int32_t mark = marks[row];
    if (mark >= 0 && mark < found && distinct[mark] == row) {
      inverse[i] = mark;
      ++counts[mark];
      continue;
    }
    marks[row] = inverse[i] = found;
    distinct[found] = row;
    counts[found++] = 1;
  }
  return found;
}
