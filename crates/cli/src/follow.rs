//! Showing it anew after every change.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use futures::{StreamExt as _, stream};
use tessera_cluster::{Client, watch};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::unhealthy;

use crate::args::View;
use crate::mirror::Mirror;
use crate::options::Reach;
use crate::run::{Context, render};
use crate::survey::Survey;
use crate::{load, print};

/// After a change, so long is waited for more of them before all is shown anew.
const SETTLE: Duration = Duration::from_millis(250);

/// Shows it anew after every change, until the user ends it.
pub(crate) async fn follow(
    client: Client,
    reach: &Reach,
    view: &View,
    context: Context,
    first: String,
) -> Result<ExitCode> {
    let rules = load::rules(&client, reach).await;
    // Who may not read the lists of broken GPUs does without, and is not told again and again.
    let may_read_lists = load::broken_lists(&client, &view.selecting).await?.is_some();
    let mut lists = match may_read_lists {
        true => watch::config_maps(client.clone(), unhealthy::NAMESPACE).boxed(),
        false => stream::pending().boxed(),
    };
    let mut nodes = std::pin::pin!(watch::selected_nodes(client.clone(), &view.selecting.nodes()));
    let mut pods = std::pin::pin!(watch::selected_pods(client, &view.selecting.pods()));
    let (mut known_nodes, mut known_pods) = (Mirror::<Node>::default(), Mirror::<Pod>::default());
    let mut known_lists = Mirror::default();
    let mut shown = first;
    redraw(&shown, context);
    let mut due = None;
    loop {
        let settled = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let trouble = tokio::select! {
            Some(change) = nodes.next() => known_nodes.take(change, |node| node.metadata.name.clone(), |_| true),
            Some(change) = pods.next() => {
                known_pods.take(change, |pod| pod.metadata.uid.clone(), |pod| pod.spec.asks_for_gpus())
            }
            Some(change) = lists.next() => {
                known_lists.take(change, |(name, _)| name.clone(), |(name, _)| name.starts_with(unhealthy::PREFIX))
            }
            () = settled => {
                due = None;
                let broken = load::broken_gpus(known_lists.objects.values().cloned());
                let nodes = known_nodes.objects.values().cloned();
                let mut survey = Survey::of_nodes(rules.clone(), nodes, &broken);
                known_pods.objects.values().cloned().for_each(|pod| survey.add(pod));
                let text = render(&survey.finish(), view, context)?;
                if text != shown {
                    redraw(&text, context);
                    shown = text;
                }
                continue;
            }
        };
        match trouble {
            Some(why) => eprintln!("warning: the watch was lost and is tried again: {why}"),
            None if known_nodes.listed && known_pods.listed && (known_lists.listed || !may_read_lists) => {
                due = due.or_else(|| Some(tokio::time::Instant::now() + SETTLE));
            }
            None => {}
        }
    }
}

/// In place of what was shown on a terminal; else below it.
pub(crate) fn redraw(text: &str, context: Context) {
    if context.terminal {
        print(&format!("\u{1b}[H\u{1b}[2J{text}"));
    } else {
        print(&format!("{text}\n"));
    }
}
