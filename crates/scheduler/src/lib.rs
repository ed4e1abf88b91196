//! The extender that kube-scheduler calls: filters and scores nodes, chooses GPUs and explains rejections.
//!
//! [`state`] and [`verb`] are free of IO. [`server`] speaks HTTP, and [`run`] holds the lease and applies watch
//! events. [`dashboard`] serves the web pages.

pub mod certificates;
pub mod dashboard;
pub mod metrics;
pub mod notices;
pub mod run;
pub mod server;
pub mod state;
pub mod verb;
