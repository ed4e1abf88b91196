//! A test bench of generated workloads: each shows whether a policy has one kind of defect.
//!
//! A [`BenchWorkload`] is a definition, [`BenchWorkload::scenario`] generates nodes, arrivals and
//! restarts from it for one seed, and [`replay`] runs one policy on them and returns [`Measures`].

mod catalog;
mod generate;
mod measures;
mod replay;
mod shapes;
mod usage;

pub use catalog::{BenchWorkload, Headline};
pub use generate::Scenario;
pub use measures::{Measure, Measures};
pub use replay::replay;
