//! `tessera migrate`: what a change to Tessera means for a cluster that shares its GPUs in another way.

mod cluster;
mod findings;
mod fit;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use serde::Deserialize;

use self::cluster::{Cluster, Objects};

/// Shows what changes in a cluster that moves to Tessera
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Check(CheckArguments),
}

/// Reads nodes and pods, and says which plugins and resources are in use, which pods would not be served or not fit,
/// and what to clean up. Changes nothing. Exit code 1 if something has to be changed first
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tessera migrate check                                    # the cluster of your kubeconfig
  kubectl get nodes,pods --all-namespaces -o json > all.json && tessera migrate check all.json

docs/migration.md has the steps for each project that Tessera replaces.")]
struct CheckArguments {
    /// Kubeconfig of the cluster; as for kubectl if absent: $KUBECONFIG, or the user's
    #[arg(long, value_name = "FILE", conflicts_with = "files")]
    kubeconfig: Option<PathBuf>,

    /// Output of `kubectl get -o json` with nodes and pods, to be read instead of the cluster
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// A list of objects, as the API server and kubectl write it.
#[derive(Debug, Deserialize)]
struct List {
    #[serde(default)]
    metadata: ListMetadata,
    items: Vec<serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
struct ListMetadata {
    #[serde(default, rename = "continue")]
    next: String,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Command::Check(arguments) = arguments.command;
    let mut objects = Objects::default();
    if arguments.files.is_empty() {
        let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
        runtime.block_on(read_cluster(arguments.kubeconfig, &mut objects))?;
    }
    for file in &arguments.files {
        let list: List = serde_json::from_str(&crate::read_file(file)?).with_context(|| {
            format!("{} is no list; write it with `kubectl get nodes,pods -A -o json`", file.display())
        })?;
        for object in list.items {
            objects.add(object).with_context(|| file.display().to_string())?;
        }
    }
    let findings = findings::of(&Cluster::new(objects));
    crate::print(&findings.to_string());
    Ok(if findings.must_change() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn read_cluster(kubeconfig: Option<PathBuf>, objects: &mut Objects) -> Result<()> {
    let client = tessera_cluster::connect(kubeconfig.as_deref()).await?;
    for (kind, path) in [("Node", "/api/v1/nodes"), ("Pod", "/api/v1/pods")] {
        let mut next = String::new();
        loop {
            let page = format!("{path}?limit=500&continue={next}");
            let request = axum::http::Request::get(page).body(Vec::new())?;
            let list: List = client.request(request).await.with_context(|| format!("cannot list {path}"))?;
            for mut object in list.items {
                // The API server leaves it out in lists.
                object["kind"] = kind.into();
                objects.add(object)?;
            }
            next = list.metadata.next;
            if next.is_empty() {
                break;
            }
        }
    }
    Ok(())
}
