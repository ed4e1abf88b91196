//! The dialects of whole GPUs: `nvidia.com/gpu` and `aliyun.com/gpu`.

use tessera_core::gpu_set::GpuSet;
use tessera_core::request::Request;

use super::{BadRequest, RequestedAmounts};

/// A resource that counts GPUs.
#[derive(Clone, Copy, Debug)]
pub struct WholeGpus {
    /// Name of the resource.
    pub resource: &'static str,
}

/// NVIDIA's resource.
pub const NVIDIA: WholeGpus = WholeGpus { resource: "nvidia.com/gpu" };

/// gputopology's resource.
pub const GPUTOPOLOGY: WholeGpus = WholeGpus { resource: "aliyun.com/gpu" };

const EXAMPLE: &str = "1 for one GPU; for a share of one request tencent.com/vcuda-core and \
                       tencent.com/vcuda-memory, or aliyun.com/gpu-mem";

impl WholeGpus {
    /// Returns a request for `count` GPUs, or `None` for zero.
    pub fn request(self, count: u64) -> Result<Option<Request>, BadRequest> {
        gpus(self.resource, count, 1)
    }

    pub(super) fn parse(self, amounts: &RequestedAmounts<'_>) -> Result<Option<Request>, BadRequest> {
        self.request(amounts.count(self.resource, EXAMPLE)?)
    }
}

/// Returns a request for `count` GPUs. Error messages count `per_gpu` units of the resource per
/// GPU.
pub(super) fn gpus(resource: &'static str, count: u64, per_gpu: u64) -> Result<Option<Request>, BadRequest> {
    let max = GpuSet::CAPACITY as u64;
    match u8::try_from(count) {
        Ok(0) => Ok(None),
        Ok(gpus) if count <= max => Ok(Some(Request::Whole(gpus))),
        _ => Err(BadRequest::TooMany { resource, value: count.saturating_mul(per_gpu), max: max * per_gpu }),
    }
}
