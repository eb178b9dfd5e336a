// Puts together what paged_attention found in the parts of a row's context, oldest first. A
// simdgroup takes one head of one row.
//
// rows [R, 2]: first item, items. tops, partial: see paged_attention.metal. newer_*: those of the parts
// after them, of which there are some if NEWER. sinks [Hq]: read only if SINKS.
// out [R, Hq, D]
constexpr int WORDS = D / 2;
constexpr int PAIRS = (WORDS + 31) / 32;

const int lane = int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int q_heads = int(threadgroups_per_grid.y);
const int2 row_items = ((const device int2*)rows)[row];
const int item = row_items.x;
const int older = row_items.y;
const int2 newer_items = NEWER ? ((const device int2*)newer_rows)[row] : int2(0);
const int newer_item = newer_items.x - older;  // where the newer ones begin, counted from the older
const int items = older + newer_items.y;
// MLX puts arrays of fewer than 8 numbers into another address space, so no type is named here.
const auto found = tops + (long(head) * tops_shape[1] + item) * 2;
const auto newer_found = newer_tops + (long(head) * newer_tops_shape[1] + newer_item) * 2;
const device float2* partial_pairs = (const device float2*)partial;
const device float2* newer_pairs = (const device float2*)newer_partial;

float largest = -1e30f;
if (SINKS) largest = float(sinks[head]);
for (int i = lane; i < items; i += 32)
  largest = metal::max(largest, i < older ? found[i * 2] : newer_found[i * 2]);
largest = simd_max(largest);

float total = 0.0f;
if (SINKS) total = metal::precise::exp(float(sinks[head]) - largest);
float2 value[PAIRS];
UNROLL for (int i = 0; i < PAIRS; i++) value[i] = float2(0.0f);
for (int first = 0; first < items; first += 32) {
  const int mine = first + lane;
  float share = 0.0f;
  float sum = 0.0f;
  if (mine < items) {
    share = metal::precise::exp((mine < older ? found[mine * 2] : newer_found[mine * 2]) - largest);
    sum = mine < older ? found[mine * 2 + 1] : newer_found[mine * 2 + 1];
  }
  const int count = metal::min(32, items - first);
  for (int j = 0; j < count; j++) {
    const float share_j = simd_broadcast(share, ushort(j));
    total += share_j * simd_broadcast(sum, ushort(j));
    const int part = first + j;
    const device float2* pairs = part < older ? partial_pairs : newer_pairs;
    const long at = (long(part < older ? item : newer_item) + part) * q_heads + head;
    UNROLL for (int i = 0; i < PAIRS; i++)
      if (WORDS % 32 == 0 || lane + i * 32 < WORDS) value[i] += share_j * pairs[at * WORDS + lane + i * 32];
  }
}

const long out_at = (long(row) * q_heads + head) * D;
UNROLL for (int i = 0; i < PAIRS; i++) {
  const int c = (lane + i * 32) * 2;
  if (c < D) {
    out[out_at + c] = T(value[i].x / total);
    out[out_at + c + 1] = T(value[i].y / total);
  }
}
