"""Times stock PyTorch (cuBLAS, its int4 kernel, its attention) at the shapes of kernel_times, beside the limits of the
same machine. Nothing here keeps the contract: it is what exactness is compared with. Needs PyTorch with CUDA.
usage: stock_times.py"""
import torch

TURNS, LAUNCHES, ROTATE = 5, 20, 256 << 20


def seconds(run):
    """The best of several runs of a graph of launches, a launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(LAUNCHES):
                run(i)
        best = 1e9
        for _ in range(TURNS + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e-3 / LAUNCHES)
    return best


def line(name, rows, time, bytes_, operations):
    print(f"{name:<34} {rows:6} {time * 1e6:10.2f} us {bytes_ / time * 1e-9:8.0f} GB/s {operations / time * 1e-12:8.1f} TFLOP/s",
          flush=True)


def copies_of(bytes_):
    return max(2, min(LAUNCHES, ROTATE // bytes_ + 1))


def products(name, out, cols, rows_list):
    weights = [torch.randn(out, cols, device="cuda", dtype=torch.bfloat16) * 0.01 for _ in range(copies_of(out * cols * 2))]
    for rows in rows_list:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        time = seconds(lambda i: torch.nn.functional.linear(x, weights[i % len(weights)]))
        line(name + " bf16", rows, time, out * cols * 2, 2 * rows * out * cols)


def int4(name, out, cols, rows_list):
    group = 64
    codes = torch.randint(0, 256, (out, cols // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    copies = [packed.clone() for _ in range(copies_of(out * cols // 2))]
    scales = torch.randn(cols // group, out, 2, device="cuda", dtype=torch.bfloat16) * 0.01
    bytes_ = out * cols // 2 + scales.numel() * 2
    for rows in rows_list:
        x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        time = seconds(lambda i: torch.ops.aten._weight_int4pack_mm(x, copies[i % len(copies)], group, scales))
        line(name + " int4", rows, time, bytes_, 2 * rows * out * cols)


def attention(rows, context, causal):
    heads, kv_heads, dim = 24, 4, 256
    q = torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.bfloat16)
    k = [torch.randn(1, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    v = [torch.randn(1, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    try:
        time = seconds(lambda i: torch.nn.functional.scaled_dot_product_attention(q, k[i % 4], v[i % 4], is_causal=causal,
                                                                                  enable_gqa=True))
        keys = (rows + 1) / 2 if causal else context
        line(f"attention {context // 1024}k", rows, time, 2 * kv_heads * context * dim * 2, 4 * rows * keys * heads * dim)
    except RuntimeError as error:
        print(f"attention {context}: {str(error).splitlines()[0]}")


print(torch.__version__, torch.cuda.get_device_name())
FEW = (1, 2, 4, 8, 16, 64)
for shape in (("27b in", 16480, 5120), ("27b qkv", 14336, 5120), ("27b out", 5120, 6144), ("27b gate_up", 34816, 5120),
              ("27b down", 5120, 17408), ("27b head", 248320, 5120)):
    products(*shape, FEW if shape[0] == "27b head" else FEW + (2048,))
for shape in (("8b qkv", 6144, 4096), ("8b out", 4096, 4096), ("8b gate_up", 28672, 4096), ("8b down", 4096, 14336),
              ("8b head", 128256, 4096)):
    products(*shape, (1, 8, 16))
try:
    for shape in (("27b in", 16384, 5120), ("27b gate_up", 34816, 5120), ("27b down", 5120, 17408)):
        int4(*shape, (1, 8, 16))
except RuntimeError as error:
    print("int4:", str(error).splitlines()[0])
attention(1, 1024, False)
attention(1, 8192, False)
attention(16, 8192, False)
attention(2048, 2048, True)
attention(2048, 8192, False)
