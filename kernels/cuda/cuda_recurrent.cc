// Ops' recurrent layers: their states, and the operations that step them.
#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/mamba2.h"
#include "kernels/cuda/short_conv.h"

namespace tensorfold {

std::string CudaOps::state_error(const StateShape& shape) const {
  if (const auto* delta = std::get_if<DeltaNetShape>(&shape); delta != nullptr) return delta_net_shape_error(*delta);
  if (const auto* conv = std::get_if<ShortConvShape>(&shape); conv != nullptr) return short_conv_shape_error(*conv);
  return mamba2_shape_error(std::get<Mamba2Shape>(shape));
}

std::unique_ptr<RecurrentState> CudaOps::make_recurrent_state(const StateShape& shape) {
  use_device();
  std::unique_ptr<RecurrentState> state;
  if (const auto* delta = std::get_if<DeltaNetShape>(&shape); delta != nullptr) {
    state = CudaRecurrentState::create(*delta, stream_);
  } else if (const auto* conv = std::get_if<ShortConvShape>(&shape); conv != nullptr) {
    state = CudaRecurrentState::create(*conv, stream_);
  } else {
    state = CudaRecurrentState::create(std::get<Mamba2Shape>(shape), stream_);
  }
  return state;
}

void CudaOps::delta_net(const DeltaNetArgs& in) {
  flush();
  const DeltaNetShape& shape = *in.shape;
  kernel_check(in.conv->size() == shape.channels() * shape.conv_kernel && in.a_log->size() == shape.v_heads &&
                   in.dt_bias->size() == shape.decays() && in.norm->size() == shape.dv &&
                   static_cast<int64_t>(shape.k_head_of.size()) == shape.v_heads,
               "delta net: shapes differ");
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaDeltaNetArgs args;
  args.shape = in.shape;
  args.layer = in.layer;
  args.qkv = matrix_of(in.qkv);
  args.z = matrix_of(in.z);
  args.b = matrix_of(in.b);
  args.a = matrix_of(in.a);
  args.conv = vector_data(in.conv);
  args.a_log = vector_data(in.a_log);
  args.dt_bias = vector_data(in.dt_bias);
  args.norm = vector_data(in.norm);
  args.decay_floor = in.decay_floor;
  args.sigmoid_gate = in.sigmoid_gate;
  args.k_head_of = head_map(shape.k_head_of);
  args.eps = in.eps;
  args.out = input_of(in.out);
  args.workspace = static_cast<float*>(take(4 * cuda_delta_net_workspace(rows, shape)));
  cuda_delta_net(stream_, rows, args);
}

void CudaOps::mamba2(const Mamba2Args& in) {
  flush();
  const Mamba2Shape& shape = *in.shape;
  kernel_check(in.conv->size() == shape.channels() * shape.conv_kernel &&
                   (in.conv_bias == nullptr || in.conv_bias->size() == shape.channels()) &&
                   in.a_log->size() == shape.heads && in.dt_bias->size() == shape.heads &&
                   in.d->size() == shape.heads && in.norm->size() == shape.width(),
               "mamba2: shapes differ");
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaMamba2Args args;
  args.shape = in.shape;
  args.layer = in.layer;
  args.z = matrix_of(in.z);
  args.xbc = matrix_of(in.xbc);
  args.dt = matrix_of(in.dt);
  args.conv = vector_data(in.conv);
  args.conv_bias = vector_data(in.conv_bias);
  args.a_log = vector_data(in.a_log);
  args.dt_bias = vector_data(in.dt_bias);
  args.d = vector_data(in.d);
  args.norm = vector_data(in.norm);
  args.eps = in.eps;
  args.least_step = in.least_step;
  args.most_step = in.most_step;
  args.out = input_of(in.out);
  args.workspace = static_cast<float*>(take(4 * cuda_mamba2_workspace(rows, shape)));
  cuda_mamba2(stream_, rows, args);
}

}  // namespace tensorfold
