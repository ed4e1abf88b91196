//! Formats the output as text.

pub(crate) mod age;
pub(crate) mod defragment;
pub(crate) mod explain;
pub(crate) mod overview;
pub(crate) mod share;
pub(crate) mod top;
pub(crate) mod topology;
pub(crate) mod tree;

use tessera_core::gpu::Model;
use tessera_core::node::Node;

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
