//! Requests as in a manifest.

use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::Count;

use crate::foreign::dialect::{Dialect, MemoryUnit, gpushare, hami, vcuda};
use crate::foreign::objects::PodSpec;

/// Formats a request as in a manifest. Returns `None` if the dialect cannot express it.
pub(super) fn of_request(dialect: Dialect, request: Request, unit: MemoryUnit) -> Option<String> {
    if let (Dialect::Hami, Request::Share(share)) = (dialect, request) {
        return Some(of_parts(share));
    }
    let (memory, some) = match request {
        Request::Whole(count) => {
            let amount = if dialect == Dialect::Vcuda { u64::from(count) * 100 } else { u64::from(count) };
            let resource = if dialect == Dialect::Hami { hami::COUNT } else { dialect.resource() };
            return Some(format!("{resource}={amount}"));
        }
        Request::Share(Share { memory: MemoryRequest::Amount(memory), .. })
            if dialect == Dialect::Gpushare =>
        {
            (memory.0 / unit.mib(), String::new())
        }
        Request::Share(Share { memory: MemoryRequest::Amount(memory), compute_percent, .. }) => {
            (memory.0 / vcuda::BLOCK.0, format!("{}={},", vcuda::CORE, compute_percent.0))
        }
        Request::Share(_) => return None,
    };
    let resource = if dialect == Dialect::Vcuda { vcuda::MEMORY } else { gpushare::MEMORY };
    (memory > 0).then(|| format!("{some}{resource}={memory}"))
}

/// Formats a share of each of several GPUs in HAMi's resources.
fn of_parts(share: Share) -> String {
    let memory = match share.memory {
        MemoryRequest::Amount(memory) => format!("{}={}", hami::MEMORY, memory.0),
        MemoryRequest::PartOfGpu(part) => format!("{}={}", hami::MEMORY_PERCENT, part.0),
    };
    let cores = share.has_compute().then(|| format!(",{}={}", hami::CORES, share.compute_percent.0));
    format!("{}={},{memory}{}", hami::COUNT, share.count, cores.unwrap_or_default())
}

/// Formats the GPU requests of all containers. Names the containers if there are several.
pub(super) fn of_pod(spec: &PodSpec, unit: MemoryUnit) -> Vec<String> {
    let claims = spec.claims(unit).unwrap_or_default();
    let several = claims.len() > 1;
    let words = claims.iter().filter_map(|claim| {
        let words = of_request(claim.dialect, claim.request, unit)?;
        Some(if several { format!("{}: {words}", claim.container) } else { words })
    });
    words.collect()
}

/// Describes the requests of claims.
pub(super) fn of_claims(requests: &[Request]) -> Vec<String> {
    let gpus = |count: u8| Count(usize::from(count), "GPU");
    let text = |request: &Request| match request {
        Request::Whole(count) => format!("claim: {}", gpus(*count)),
        Request::Share(share) => {
            let memory = match share.memory {
                MemoryRequest::Amount(memory) => memory.to_string(),
                MemoryRequest::PartOfGpu(part) => format!("{part} of the memory"),
            };
            format!("claim: {} and {memory} of {}", share.compute_percent, gpus(share.count))
        }
    };
    requests.iter().map(text).collect()
}
