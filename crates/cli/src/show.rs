//! Text.

pub(crate) mod explain;
pub(crate) mod share;
pub(crate) mod top;
pub(crate) mod topology;
pub(crate) mod tree;

use tessera_core::gpu::Model;
use tessera_core::node::Node;
use tessera_core::request::Request;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda};

/// `8 x NVIDIA H200`, or each kind where they differ.
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

/// A request as a manifest writes it; `None` where the vocabulary has no number for it.
pub(crate) fn request_words(dialect: Dialect, request: Request, unit: MemoryUnit) -> Option<String> {
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

/// `1 node`, `2 nodes`.
pub(crate) fn count(number: usize, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}
