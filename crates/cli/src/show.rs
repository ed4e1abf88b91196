//! Formats the output as text.

pub(crate) mod explain;
pub(crate) mod share;
pub(crate) mod top;
pub(crate) mod topology;
pub(crate) mod tree;

use tessera_core::gpu::Model;
use tessera_core::node::Node;
use tessera_core::request::Request;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda};

/// Lists the GPU models of a node, such as `8 x NVIDIA H200`.
pub(crate) fn models(node: &Node) -> String {
    let mut counts: Vec<(&Model, usize)> = Vec::new();
    for gpu in node.gpus() {
        match counts.iter_mut().find(|(known, _)| **known == gpu.model) {
            Some((_, count)) => *count += 1,
            None => counts.push((&gpu.model, 1)),
        }
    }
    counts.iter().map(|(model, count)| format!("{count} x {model}")).collect::<Vec<_>>().join(", ")
}

/// Formats a request as in a manifest. Returns `None` if the dialect cannot express it.
pub(crate) fn request_text(dialect: Dialect, request: Request, unit: MemoryUnit) -> Option<String> {
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
