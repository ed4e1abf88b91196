//! CPU profiles of the running process, in the format of pprof.
//!
//! [`record`] samples the stacks of threads that use the processor, and [`Profile::print`] writes them as
//! gzip-compressed protobuf, which `go tool pprof` and other viewers read. A process that records no profile has
//! no timer, no signal handler and no buffer.

mod mappings;
mod message;
mod report;
mod sampler;

pub use self::{
    mappings::Mapping,
    report::Profile,
    sampler::{MAX_DURATION, ProfileError, record},
};
