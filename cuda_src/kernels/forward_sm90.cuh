// Forward attention for Hopper: wgmma on tiles that TMA brings in, one producer warp and one to four consumer
// warpgroups.
//
// Config: Element, Mask, Score; kBlockQ, kBlockK, kHeadDim, kHeadDimV (the last two rounded up to 16), kWarpgroups,
// kStages and kQStages of the rings, kBase, kSchedule, kTurns (warpgroups take turns on the tensor cores) and
// kSkipBlocks (a warpgroup leaves out blocks that hold none of its keys), kSharedBytes (what the launch asks for),
// kPacksHeads (the query heads of a group share a tile) and kSplitsKeys (several tiles share the keys of a row;
// forward_combine follows), kOutSlabs (slabs of outputs that a warp hands to the copy engine at a time; 0: it writes them
// itself) and kStoresPieces (then in pieces of 16 bytes).
#pragma once
#include "kernels/forward_sm90_consumer.cuh"
#include "kernels/forward_sm90_producer.cuh"
#include "kernels/forward_sm90_redo.cuh"
#include "ptx/registers.cuh"

namespace cuflash {

template <class Config>
CUFLASH_DEVICE void forward_sm90_consume(const typename ForwardSm90<Config>::Params& params,
                                         const typename ForwardSm90<Config>::Shared& shared) {
  using F = ForwardSm90<Config>;
  const int warpgroup = ptx::warp_index() / 4 - 1;  // of the consumers
  const bool is_speaker = ptx::thread_index() % tile::kWarpgroupThreads == 0;
  ForwardSm90Consumer<Config> consumer{params, shared, warpgroup, is_speaker};
  // The last warpgroup hands the first turn to the first one.
  if (consumer.warpgroup == F::kWarpgroups - 1) consumer.give_turn_to(0);
#pragma unroll 1
  for (;; ++consumer.number) {
    const WorkItem work = shared.board.read(consumer.number);
    if (work.kind == kWorkEnd) break;
    bool refused = false;
    if (work.kind == kWorkRedo) {
      ForwardSm90Redo<Config>(consumer, work).run();
    } else {
      refused = consumer.run_tile(work);
    }
    ptx::sync_warp();
    const int consumer_warp = ptx::thread_index() / 32 - 4;  // found anew for each tile: the loops need every register
    if (ptx::lane_index() == 0) shared.board.judge(consumer.number, consumer_warp, refused);
  }
  if (F::kOutSlabs > 0 && ptx::lane_index() == 0) ptx::bulk_wait_read<0>();  // shared memory outlives its readers
}

template <class Config>
CUFLASH_DEVICE void forward_sm90(const typename ForwardSm90<Config>::Params& params) {
  using F = ForwardSm90<Config>;
  const typename F::Shared shared = F::shared();
  if (ptx::thread_index() == 0) {
    shared.q.init(F::kWarpgroups / F::kQParts);
    shared.k.init(F::kWarpgroups);
    shared.v.init(F::kWarpgroups);
    shared.board.init();
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();  // the barriers are set up
  if (ptx::warp_index() < 4) {
    if constexpr (F::kSplitsRegisters) ptx::setmaxnreg_dec<F::kProducerRegisters>();
    if (ptx::thread_index() == 0) {
      if constexpr (Config::kSplitsKeys) ptx::griddepcontrol_launch();  // forward_combine gets ready and waits
      ForwardSm90Producer<Config>(params, shared).run();
    }
  } else {
    if constexpr (F::kSplitsRegisters) ptx::setmaxnreg_inc<F::kConsumerRegisters>();
    forward_sm90_consume<Config>(params, shared);
  }
}

}  // namespace cuflash
