//! The vocabularies of whole GPUs: `nvidia.com/gpu` and `aliyun.com/gpu`.

use tessera_core::gpu_set::GpuSet;
use tessera_core::request::Request;

use super::{Asked, BadRequest};

/// A resource that counts GPUs.
#[derive(Clone, Copy, Debug)]
pub struct WholeGpus {
    /// Its name.
    pub resource: &'static str,
}

/// NVIDIA's own.
pub const NVIDIA: WholeGpus = WholeGpus { resource: "nvidia.com/gpu" };

/// gputopology's.
pub const GPUTOPOLOGY: WholeGpus = WholeGpus { resource: "aliyun.com/gpu" };

const EXAMPLE: &str = "1 for one GPU; for a part of one ask for tencent.com/vcuda-core and \
                       tencent.com/vcuda-memory, or for aliyun.com/gpu-mem";

impl WholeGpus {
    /// So many GPUs; `None` for none.
    pub fn request(self, count: u64) -> Result<Option<Request>, BadRequest> {
        cards(self.resource, count, 1)
    }

    pub(super) fn read(self, asked: &Asked<'_>) -> Result<Option<Request>, BadRequest> {
        self.request(asked.count(self.resource, EXAMPLE)?)
    }
}

/// `count` GPUs, where the resource counts `per_gpu` for each.
pub(super) fn cards(resource: &'static str, count: u64, per_gpu: u64) -> Result<Option<Request>, BadRequest> {
    let most = GpuSet::CAPACITY as u64;
    match u8::try_from(count) {
        Ok(0) => Ok(None),
        Ok(cards) if count <= most => Ok(Some(Request::Whole(cards))),
        _ => {
            Err(BadRequest::TooMany { resource, value: count.saturating_mul(per_gpu), most: most * per_gpu })
        }
    }
}
