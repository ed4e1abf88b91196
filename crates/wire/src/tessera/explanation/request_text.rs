//! Requests as in a manifest.

use tessera_core::request::Request;

use crate::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda};
use crate::foreign::objects::PodSpec;

/// Formats a request as in a manifest. Returns `None` if the dialect cannot express it.
pub(super) fn of_request(dialect: Dialect, request: Request, unit: MemoryUnit) -> Option<String> {
    let (memory, some) = match request {
        Request::Whole(count) => {
            let amount = if dialect == Dialect::Vcuda { u64::from(count) * 100 } else { u64::from(count) };
            return Some(format!("{dialect}={amount}"));
        }
        Request::Memory(memory) => (memory.0 / unit.mib(), String::new()),
        Request::Share { compute_percent, memory } => {
            (memory.0 / vcuda::BLOCK.0, format!("{}={},", vcuda::CORE, compute_percent.0))
        }
    };
    let resource = if dialect == Dialect::Vcuda { vcuda::MEMORY } else { gpushare::MEMORY };
    (memory > 0).then(|| format!("{some}{resource}={memory}"))
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
