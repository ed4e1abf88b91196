//! Runs one scenario inside its enclosure.

use std::{path::Path, process::ExitCode};

use anyhow::{Error, Result, anyhow};
use tokio::task::LocalSet;

use crate::{
    enclosure,
    harness::{Harness, tail},
    runner::Settings,
    scenarios::Enclosed,
};

/// Lines shown of the log of a component that died.
const MAX_LINES_AFTER_DEATH: usize = 40;

/// Lines shown of every log if no component died.
const MAX_LINES_OTHERWISE: usize = 12;

/// Sets up the enclosure and runs the scenario. When this process ends, the kernel ends everything
/// in the enclosure.
pub(crate) fn run(directory: &Path, settings: &Settings, scenario: Enclosed) -> Result<ExitCode> {
    enclosure::set_up(directory)?;
    let harness = Harness::new(directory, &settings.programs, settings.record);
    let runtime = tokio::runtime::Runtime::new()?;
    // A panic in a separate task ends the scenario but not this process.
    let tasks = LocalSet::new();
    let task = tasks.spawn_local(scenario(harness.clone()));
    let outcome = tasks.block_on(&runtime, task).unwrap_or_else(|panic| Err(panic_error(panic)));
    let Err(error) = outcome else {
        return Ok(ExitCode::SUCCESS);
    };
    println!("  failed: {error:#}");
    show_logs(&harness);
    Ok(ExitCode::FAILURE)
}

fn panic_error(error: tokio::task::JoinError) -> Error {
    match error.try_into_panic() {
        Ok(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            anyhow!("panicked: {}", text.unwrap_or("without a message"))
        }
        Err(error) => error.into(),
    }
}

/// Shows the logs of components that died, or the ends of all logs if none died.
fn show_logs(harness: &Harness) {
    let deaths = harness.components().deaths();
    if deaths.is_empty() {
        for (name, log) in harness.components().logs() {
            show(&format!("end of the log of {name}"), &tail(&log, MAX_LINES_OTHERWISE));
        }
    }
    for death in deaths {
        show(&format!("{death}; end of its log"), &tail(&death.log, MAX_LINES_AFTER_DEATH));
    }
}

fn show(title: &str, text: &str) {
    println!("  ---- {title}");
    for line in text.lines() {
        println!("  | {line}");
    }
}
