// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace jaxsparse {

// Asks Linux to hold a large table in pages of 2 MiB, once a table: rows are read at random, and
// with pages of 4 KiB nearly every one of them costs a walk through the page tables as well.
// Changes no content; where it cannot be had nothing happens.
void use_huge_pages(const void* data, int64_t bytes);

}  // namespace jaxsparse
