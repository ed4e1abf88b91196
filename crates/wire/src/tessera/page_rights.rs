//! Non-resource URLs in ClusterRoles that permit to read HTTP pages. They are names of Tessera's own: the paths of the
//! pages are also those of other programs, such as `/metrics`, and a right to one program must not be one to another.

/// The metrics of agents and of the scheduler.
pub const METRICS: &str = "/tessera/metrics";

/// The usage that agents measure, which the scheduler reads.
pub const USE: &str = "/tessera/use";

/// All other pages of agents.
pub const AGENT: &str = "/tessera/agent";

/// The dashboard of the scheduler and its API.
pub const DASHBOARD: &str = "/tessera/dashboard";
