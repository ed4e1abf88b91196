//! What the daemons log, and how: on standard error, in colour for people at a terminal only.

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use clap::Args;
use tracing_subscriber::EnvFilter;

/// The client library logs each request that fails, without its cause, and each watch that ends. Whoever made the request says it
/// better.
const SAID_BY_US: &str = "kube_client::client=off";

const LOGGING: &str = "Logging";

/// How a daemon logs.
#[derive(Debug, Args)]
pub(crate) struct LogArguments {
    /// What to log: error, warn, info, debug, or a filter by module such as info,tessera_node=debug
    #[arg(long, value_name = "FILTER", help_heading = LOGGING, env = "TESSERA_LOG", default_value = "info")]
    log: String,

    /// Log as JSON, one object a line
    #[arg(long, help_heading = LOGGING)]
    log_json: bool,
}

impl LogArguments {
    pub(crate) fn start(&self) -> Result<()> {
        start(&self.log, self.log_json)
    }
}

/// For commands that say what they have to say themselves: the log is for what they did not expect.
pub(crate) fn start_quietly(unless_told: &str) -> Result<()> {
    start(&std::env::var("TESSERA_LOG").unwrap_or_else(|_| unless_told.to_owned()), false)
}

fn start(filter: &str, json: bool) -> Result<()> {
    let filter = EnvFilter::try_new(format!("{SAID_BY_US},{filter}"))
        .with_context(|| format!("cannot log by {filter:?}; write error, warn, info or debug"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // It would complain on standard error as well, and panic where the reader of that went away.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    if json {
        log.json().init();
    } else {
        log.init();
    }
    Ok(())
}
