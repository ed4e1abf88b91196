//! Logging of the daemons: on standard error, coloured only on a terminal.

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use clap::Args;
use tracing_subscriber::EnvFilter;

/// The client library logs failed requests without their cause, and every watch that ends. The
/// callers log these with more detail.
const LOGGED_BY_CALLERS: &str = "kube_client::client=off";

const LOGGING: &str = "Logging";

/// Logging options of a daemon.
#[derive(Debug, Args)]
pub(crate) struct LogArguments {
    /// Log level or filter: error, warn, info, debug, or by module such as info,tessera_node=debug
    #[arg(long, value_name = "FILTER", help_heading = LOGGING, env = "TESSERA_LOG", default_value = "info")]
    log: String,

    /// Log as JSON, one object per line
    #[arg(long, help_heading = LOGGING)]
    log_json: bool,
}

impl LogArguments {
    pub(crate) fn start(&self) -> Result<()> {
        start(&self.log, self.log_json)
    }
}

/// Starts logging for commands with their own output. `default_filter` applies unless the
/// environment sets a filter.
pub(crate) fn start_quietly(default_filter: &str) -> Result<()> {
    start(&std::env::var("TESSERA_LOG").unwrap_or_else(|_| default_filter.to_owned()), false)
}

fn start(filter: &str, json: bool) -> Result<()> {
    let filter = EnvFilter::try_new(format!("{LOGGED_BY_CALLERS},{filter}"))
        .with_context(|| format!("cannot log by {filter:?}; write error, warn, info or debug"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // Otherwise it would report a closed standard error on standard error, and panic.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    if json {
        log.json().init();
    } else {
        log.init();
    }
    Ok(())
}
