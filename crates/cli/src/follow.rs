//! Watches the cluster and prints the output again after every change.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use futures::{StreamExt as _, stream};
use tessera_cluster::{Client, watch};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::unhealthy;

use crate::args::View;
use crate::mirror::Mirror;
use crate::options::SourceOptions;
use crate::run::{Context, render};
use crate::survey::Survey;
use crate::{load, print};

/// Time to wait for further changes before the output is printed again.
const SETTLE_TIME: Duration = Duration::from_millis(250);

/// Prints the output after every change until the user stops the program.
pub(crate) async fn follow(
    client: Client,
    source: &SourceOptions,
    view: &View,
    context: Context,
    first: String,
) -> Result<ExitCode> {
    let rules = load::rules(&client, source).await;
    // A user without permission to read the lists of unhealthy GPUs gets no watch and no warnings.
    let may_read_lists = load::unhealthy_lists(&client, &view.selection).await?.is_some();
    let mut lists = match may_read_lists {
        true => watch::config_maps(client.clone(), unhealthy::NAMESPACE).boxed(),
        false => stream::pending().boxed(),
    };
    let mut nodes = std::pin::pin!(watch::selected_nodes(client.clone(), &view.selection.nodes()));
    let mut pods = std::pin::pin!(watch::selected_pods(client.clone(), &view.selection.pods()));
    let (mut known_nodes, mut known_pods) = (Mirror::<Node>::default(), Mirror::<Pod>::default());
    let mut known_lists = Mirror::default();
    let mut printed = first;
    redraw(&context.fitted_view(&printed, view), context);
    let mut due = None;
    loop {
        let settled = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let failure = tokio::select! {
            Some(change) = nodes.next() => known_nodes.take(change, |node| node.metadata.name.clone(), |_| true),
            Some(change) = pods.next() => {
                known_pods.take(change, |pod| pod.metadata.uid.clone(), |pod| pod.spec.asks_for_gpus())
            }
            Some(change) = lists.next() => {
                known_lists.take(change, |(name, _)| name.clone(), |(name, _)| name.starts_with(unhealthy::PREFIX))
            }
            () = settled => {
                due = None;
                let unhealthy_gpus = load::unhealthy_gpus(known_lists.objects.values().cloned());
                let nodes = known_nodes.objects.values().cloned();
                let mut survey = Survey::of_nodes(rules.clone(), nodes, &unhealthy_gpus);
                survey.now_seconds = load::now_seconds();
                if view.selection.node.is_some() {
                    survey.waiting_owners = load::waiting_owners(&client, &survey).await;
                }
                known_pods.objects.values().cloned().for_each(|pod| survey.add(pod));
                let text = render(&survey.finish(), view, context)?;
                if text != printed {
                    redraw(&context.fitted_view(&text, view), context);
                    printed = text;
                }
                continue;
            }
        };
        match failure {
            Some(reason) => eprintln!("warning: the watch was interrupted and is retried: {reason}"),
            None if known_nodes.listed && known_pods.listed && (known_lists.listed || !may_read_lists) => {
                due = due.or_else(|| Some(tokio::time::Instant::now() + SETTLE_TIME));
            }
            None => {}
        }
    }
}

/// Prints the text over the previous output on a terminal, or below it otherwise.
pub(crate) fn redraw(text: &str, context: Context) {
    if context.terminal {
        print(&format!("\u{1b}[H\u{1b}[2J{text}"));
    } else {
        print(&format!("{text}\n"));
    }
}
