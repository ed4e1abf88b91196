//! The verbs kube-scheduler calls. Whatever comes in, the answer has the form of the contract.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State as FromApp;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tessera_wire::extender::{Args, FilterResult, HostPriority, PreemptionArgs, PreemptionResult};

use super::App;
use crate::verb::filter::Verdicts;

/// A body, or why there is none.
pub(super) type Body = Result<Bytes, BytesRejection>;

const NOT_READY: &str = "this replica of the scheduler does not lead, or has not read the cluster yet";

/// Reads a body, if this replica is in a position to answer.
pub(super) fn read<T: DeserializeOwned>(app: &App, body: &Body) -> Result<T, String> {
    if !app.is_ready() {
        return Err(NOT_READY.to_owned());
    }
    let bytes = body.as_ref().map_err(|rejection| rejection.body_text())?;
    serde_json::from_slice(bytes).map_err(|error| format!("cannot read the request: {error}"))
}

pub(super) async fn filter(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    let begun = Instant::now();
    let mut args: Args = match read(&app, &body) {
        Ok(args) => args,
        Err(error) => {
            app.metrics.answered("filter", "error", begun.elapsed());
            return Json(FilterResult { error, ..FilterResult::default() }).into_response();
        }
    };
    let by_node = args.nodes.is_some() && args.node_names.is_none();
    let verdicts = app.read().filter(&mut args);
    for (reason, nodes) in &verdicts.reasons {
        app.metrics.refused(reason, *nodes);
    }
    app.dashboard.decisions.filtered(app.now(), &args.pod, &verdicts);
    let outcome = if verdicts.fitting.is_empty() { "none" } else { "some" };
    let answer = match body {
        Ok(bytes) if by_node => Json(with_whole_nodes(verdicts, &bytes)).into_response(),
        _ => Json(verdicts.into_result()).into_response(),
    };
    app.metrics.answered("filter", outcome, begun.elapsed());
    answer
}

pub(super) async fn prioritize(FromApp(app): FromApp<Arc<App>>, body: Body) -> Json<Vec<HostPriority>> {
    let begun = Instant::now();
    let (outcome, grades) = match read::<Args>(&app, &body) {
        Ok(mut args) => ("ok", app.read().prioritize(&mut args)),
        // There is no place for an error, and kube-scheduler would not show it.
        Err(_) => ("error", Vec::new()),
    };
    app.metrics.answered("prioritize", outcome, begun.elapsed());
    Json(grades)
}

pub(super) async fn preempt(FromApp(app): FromApp<Arc<App>>, body: Body) -> Json<PreemptionResult> {
    let begun = Instant::now();
    let (outcome, result) = match read::<PreemptionArgs>(&app, &body) {
        Ok(args) => {
            let result = app.read().preempt(&args);
            app.dashboard.decisions.preempted(app.now(), &args.pod, &result, &app.read());
            ("ok", result)
        }
        Err(_) => ("error", PreemptionResult::default()),
    };
    app.metrics.answered("preempt", outcome, begun.elapsed());
    Json(result)
}

/// The answer to a question with whole nodes gives them back untouched: kube-scheduler goes on with what it gets.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct WholeResult<'a> {
    nodes: RawList<'a>,
    node_names: Option<Vec<String>>,
    failed_nodes: BTreeMap<String, String>,
    failed_and_unresolvable_nodes: BTreeMap<String, String>,
    error: &'static str,
}

#[derive(Default, Serialize, Deserialize)]
struct RawList<'a> {
    #[serde(borrow, alias = "Items", default)]
    items: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RawArgs<'a> {
    #[serde(borrow, alias = "nodes")]
    nodes: RawList<'a>,
}

#[derive(Deserialize)]
struct Named {
    metadata: NamedMeta,
}

#[derive(Deserialize)]
struct NamedMeta {
    name: String,
}

fn with_whole_nodes(verdicts: Verdicts, bytes: &[u8]) -> WholeResult<'_> {
    // It was read before, so it can be read again.
    let mut nodes = serde_json::from_slice::<RawArgs<'_>>(bytes).map(|args| args.nodes).unwrap_or_default();
    let fitting: std::collections::HashSet<&str> = verdicts.fitting.iter().map(String::as_str).collect();
    nodes.items.retain(|item| {
        serde_json::from_str::<Named>(item.get())
            .is_ok_and(|node| fitting.contains(node.metadata.name.as_str()))
    });
    drop(fitting);
    WholeResult {
        nodes,
        node_names: Some(verdicts.fitting),
        failed_nodes: verdicts.failed,
        failed_and_unresolvable_nodes: verdicts.unresolvable,
        error: "",
    }
}
