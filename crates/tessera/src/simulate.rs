//! `tessera simulate`: evaluates placement policies on recorded and generated workloads and on job
//! streams.

mod cluster;
mod cluster_report;
mod defragment;
mod gangs;
mod parallel;
mod plot;
mod progress;
mod topology;
mod workloads;
mod workloads_report;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use serde::Serialize;

/// Compares placement policies on recorded and generated workloads
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    Cluster(cluster::Arguments),
    Defragment(defragment::Arguments),
    Gangs(gangs::Arguments),
    Topology(topology::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.experiment {
        Experiment::Cluster(arguments) => cluster::run_arguments(arguments),
        Experiment::Defragment(arguments) => defragment::run(arguments),
        Experiment::Gangs(arguments) => gangs::run(arguments),
        Experiment::Topology(arguments) => topology::run(arguments),
    }
}

/// Writes a result as JSON to a file, or to standard output for `-`.
fn write_json(file: &Path, result: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(result)? + "\n";
    if file == Path::new("-") {
        crate::print(&text);
        return Ok(());
    }
    write_file(file, &text)
}

fn write_file(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
