//! The kubectl plugins. They show free GPUs, the pods that hold GPUs, and why a pod waits, with the
//! user's own permissions. Only `cordon`, `uncordon` and `defragment --apply` change anything.
//!
//! [`survey`] is the state of the cluster as a pure value, `show` formats it, and the other modules
//! fetch and print.

mod args;
mod complete;
mod cordon;
mod defragment;
mod document;
mod endpoint;
mod explain;
mod follow;
mod gangs;
mod known_pod;
mod load;
mod mirror;
mod options;
mod paint;
mod plugin;
mod run;
mod share;
mod show;
pub mod survey;
mod table;
mod top;
mod usage;
mod what_if;

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{Args, Parser as _};
use tessera_cluster::ApiError;

pub use self::plugin::Plugin;
use self::{args::Arguments, paint::Paint, run::Context};

/// Runs the plugin that the program's file name selects, or `default` for any other name.
#[must_use]
pub fn main(default: Plugin) -> ExitCode {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    let name = words.first().cloned().unwrap_or_default();
    let (plugin, completes) = Plugin::called(&name).unwrap_or((default, false));
    let completes = completes || words.get(1).is_some_and(|word| word == complete::COMMAND);
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into()),
    };
    if completes {
        let words = words.split_off(1).into_iter().map(|word| word.to_string_lossy().into_owned());
        let words: Vec<String> = words.skip_while(|word| word == complete::COMMAND).collect();
        print(&runtime.block_on(complete::print_candidates(plugin, &words)));
        return ExitCode::SUCCESS;
    }
    let words = args::normalize(words);
    let arguments = match plugin {
        Plugin::Gpu => args::Gpu::try_parse_from(words).and_then(args::Gpu::checked).map(Arguments::from),
        Plugin::Share => args::Share::try_parse_from(words).map(Arguments::from),
    };
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(error) => return bad_usage(plugin, &error),
    };
    let outcome = runtime.block_on(run::run(arguments, context(plugin)));
    // A watch may still hold a connection. Exit without waiting for it.
    runtime.shutdown_background();
    outcome.unwrap_or_else(|error| fail(&error))
}

/// The command `defragment` of `kubectl inspect gpu`, for the program `tessera`, which has it under its own name.
#[derive(Debug, Args)]
pub struct DefragmentCommand {
    #[command(flatten)]
    source: options::SourceOptions,
    #[command(flatten)]
    options: args::Defragment,
}

impl DefragmentCommand {
    /// Plans the moves and carries them out if asked to.
    pub async fn run(self) -> Result<ExitCode> {
        let action = args::CliAction::Run(args::Command::Defragment(self.options));
        Box::pin(run::run(Arguments { source: self.source, action }, context(Plugin::Gpu))).await
    }
}

/// Returns what is known of the terminal.
fn context(plugin: Plugin) -> Context {
    let terminal = std::io::stdout().is_terminal();
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let columns =
        terminal_size::terminal_size().map(|(terminal_size::Width(columns), _)| usize::from(columns));
    let columns = columns.filter(|_| terminal);
    Context { plugin, paint: Paint { on: terminal && !no_color }, terminal, columns }
}

/// Prints help and the version to standard output. Prints any other message as an error that points
/// to the help, and exits with code 1, like kubectl.
fn bad_usage(plugin: Plugin, error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        print(&error.to_string());
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let first = text.lines().take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    // clap suggests passing an unknown option as a node name, which is never intended.
    let is_useful = |line: &&str| line.starts_with("tip:") && !line.starts_with("tip: to pass");
    let tip = text.lines().find(|line| is_useful(&line.trim_start()));
    eprintln!("{first}{}", tip.map(|tip| format!("\n{tip}")).unwrap_or_default());
    eprintln!("See '{} --help' for usage.", plugin.command());
    ExitCode::FAILURE
}

fn fail(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<ApiError>() {
        // kubectl prints the API server's own message.
        Some(api) => eprintln!("{api}"),
        None => eprintln!("error: {}", in_full(error)),
    }
    if error.downcast_ref::<ApiError>().is_some_and(ApiError::is_forbidden) {
        eprintln!("{FORBIDDEN}");
    }
    ExitCode::FAILURE
}

/// Formats an error with its causes, and omits causes whose text is already included.
fn in_full(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

const FORBIDDEN: &str = "
The plugin reads nodes and pods. You need get, list and watch on nodes and on pods of all namespaces.
An administrator can grant it:
  kubectl create clusterrole gpu-inspector --verb=get,list,watch --resource=nodes,pods
  kubectl create clusterrolebinding gpu-inspector --clusterrole=gpu-inspector --user=YOU
Or query a scheduler that may read them: --endpoint http://HOST:PORT";

/// Writes to standard output. A closed standard output, for example by `head`, is not an error.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
