//! Running one scenario, inside its enclosure.

use std::{path::Path, process::ExitCode};

use anyhow::{Error, Result, anyhow};
use tokio::task::LocalSet;

use crate::{
    enclosure,
    harness::{Harness, tail},
    runner::Settings,
    scenarios::Enclosed,
};

/// How much of the log of a component that died is shown.
const LINES_OF_THE_DEAD: usize = 40;

/// How much of every log is shown when none died.
const LINES_OF_THE_LIVING: usize = 12;

/// Furnishes the enclosure and runs the scenario. When this process ends, so does everything in here.
pub(crate) fn run(directory: &Path, settings: &Settings, scenario: Enclosed) -> Result<ExitCode> {
    enclosure::set_up(directory)?;
    let harness = Harness::new(directory, &settings.programs, settings.record);
    let runtime = tokio::runtime::Runtime::new()?;
    // A task of its own, so that a panic ends the scenario and not this process.
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

/// The logs of those that died; if none did, the end of every log.
fn show_logs(harness: &Harness) {
    let deaths = harness.components().deaths();
    if deaths.is_empty() {
        for (name, log) in harness.components().logs() {
            show(&format!("end of the log of {name}"), &tail(&log, LINES_OF_THE_LIVING));
        }
    }
    for death in deaths {
        show(&format!("{death}; end of its log"), &tail(&death.log, LINES_OF_THE_DEAD));
    }
}

fn show(title: &str, text: &str) {
    println!("  ---- {title}");
    for line in text.lines() {
        println!("  | {line}");
    }
}
