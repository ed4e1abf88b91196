//! The extender kube-scheduler calls: which node, which GPUs, and why not.
//!
//! [`state`] knows, [`verb`] answers, both without any IO; [`server`] speaks HTTP and [`run`] keeps the state fed and the
//! lease held. [`dashboard`] shows it to people.

pub mod dashboard;
pub mod files;
pub mod metrics;
pub mod notices;
pub mod run;
pub mod server;
pub mod state;
pub mod verb;
