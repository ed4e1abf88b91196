//! Kernels and graphs.

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
    ) on told(config).0, like key(function, told(config).1);
    [cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz] (
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: Handle, parameters: Arguments,
    ) on stream, like key(function, [gx, gy, gz]);
    // One kernel on each of several GPUs: what is held back is the whole, at the gate of the current GPU.
    [cuLaunchCooperativeKernelMultiDevice] (launches: *mut c_void, count: c_uint, flags: c_uint)
        on DEFAULT_STREAM, like key(launches, [count, 0, 0]);
    [cuLaunch] (function: Handle) on DEFAULT_STREAM, like key(function, [1; 3]);
    [cuLaunchGrid] (function: Handle, width: c_int, height: c_int)
        on DEFAULT_STREAM, like key(function, [width.cast_unsigned(), height.cast_unsigned(), 1]);
    [cuLaunchGridAsync] (function: Handle, width: c_int, height: c_int, stream: Handle)
        on stream, like key(function, [width.cast_unsigned(), height.cast_unsigned(), 1]);
    [cuGraphLaunch cuGraphLaunch_ptsz] (graph: Handle, stream: Handle) on stream, like of_graph(graph);
}

/// The stream and the grid of a launch.
fn told(config: *const LaunchConfig) -> (Handle, [u32; 3]) {
    // SAFETY: the program passes a configuration or null.
    unsafe { config.as_ref() }.map_or((DEFAULT_STREAM, [0; 3]), |told| (told.stream, told.grid))
}

/// The key of a graph, each launch of which is equal work.
pub fn of_graph(graph: Handle) -> u64 {
    key(graph, [0; 3])
}

fn key(what: Handle, [width, height, depth]: [u32; 3]) -> u64 {
    mix(mix(what.addr() as u64, u64::from(width) | u64::from(height) << 32), u64::from(depth))
}
