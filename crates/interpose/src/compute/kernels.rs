//! Hooks of the functions that launch kernels and graphs.

use std::ffi::{c_int, c_uint, c_void};

use super::{mix, work};
use crate::cuda::{DEFAULT_STREAM, Handle, LaunchConfig};

type Arguments = *mut *mut c_void;

work! {
    [cuLaunchKernel cuLaunchKernel_ptsz] (
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: Handle, parameters: Arguments, extra: Arguments,
    ) on stream, like key(function, [gx, gy, gz]);
    [cuLaunchKernelEx cuLaunchKernelEx_ptsz] (
        config: *const LaunchConfig, function: Handle, parameters: Arguments, extra: Arguments,
    ) on stream_and_grid(config).0, like key(function, stream_and_grid(config).1);
    [cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz] (
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: Handle, parameters: Arguments,
    ) on stream, like key(function, [gx, gy, gz]);
    // This function launches one kernel on each of several GPUs. The gate of the current GPU blocks
    // the whole launch.
    [cuLaunchCooperativeKernelMultiDevice] (launches: *mut c_void, count: c_uint, flags: c_uint)
        on DEFAULT_STREAM, like key(launches, [count, 0, 0]);
    [cuLaunch] (function: Handle) on DEFAULT_STREAM, like key(function, [1; 3]);
    [cuLaunchGrid] (function: Handle, width: c_int, height: c_int)
        on DEFAULT_STREAM, like key(function, [width.cast_unsigned(), height.cast_unsigned(), 1]);
    [cuLaunchGridAsync] (function: Handle, width: c_int, height: c_int, stream: Handle)
        on stream, like key(function, [width.cast_unsigned(), height.cast_unsigned(), 1]);
    [cuGraphLaunch cuGraphLaunch_ptsz] (graph: Handle, stream: Handle) on stream, like graph_key(graph);
}

/// Returns the stream and the grid of a launch.
fn stream_and_grid(config: *const LaunchConfig) -> (Handle, [u32; 3]) {
    // SAFETY: the program passes null or a configuration that the driver reads as well.
    unsafe { config.as_ref() }.map_or((DEFAULT_STREAM, [0; 3]), |config| (config.stream, config.grid))
}

/// Returns the key of a graph. All launches of one graph are equal work.
pub fn graph_key(graph: Handle) -> u64 {
    key(graph, [0; 3])
}

/// Returns the key of a function or graph with a grid.
fn key(what: Handle, [width, height, depth]: [u32; 3]) -> u64 {
    mix(mix(what.addr() as u64, u64::from(width) | u64::from(height) << 32), u64::from(depth))
}
