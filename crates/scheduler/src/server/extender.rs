//! The verbs kube-scheduler calls. Whatever comes in, the answer has the form of the contract.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State as FromApp;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use tessera_wire::foreign::extender::{
    BorrowedName, ExtenderArgs, FilterResult, PreemptionArgs, PreemptionResult,
};
use tessera_wire::foreign::objects::Pod;

use super::App;
use crate::notices::NoticeReason;
use crate::verb::ask::ParsedPod;
use crate::verb::filter::Verdicts;
use crate::verb::reason::QUOTA;

/// A body, or why there is none.
pub(super) type Body = Result<Bytes, BytesRejection>;

const NOT_READY: &str = "this replica of the scheduler does not lead, or has not read the cluster yet";

/// Reads a body, if this replica is in a position to answer.
pub(super) fn read<'b, T: Deserialize<'b>>(app: &App, body: &'b Body) -> Result<T, String> {
    if !app.is_ready() {
        return Err(NOT_READY.to_owned());
    }
    let bytes = body.as_ref().map_err(|rejection| rejection.body_text())?;
    serde_json::from_slice(bytes).map_err(|error| format!("cannot read the request: {error}"))
}

pub(super) async fn filter(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    let begun = Instant::now();
    let args: ExtenderArgs<BorrowedName<'_>> = match read(&app, &body) {
        Ok(args) => args,
        Err(error) => {
            app.metrics.answered("filter", "error", begun.elapsed());
            return Json(FilterResult { error, ..FilterResult::default() }).into_response();
        }
    };
    let mut verdicts = app.read().filter(&args, &app.verdicts);
    if verdicts.fit == 0 && app.retry_wait.wait_for_change(&args.pod.metadata.uid).await {
        verdicts = app.read().filter(&args, &app.verdicts);
    }
    for (reason, nodes) in &verdicts.reasons {
        app.metrics.refused(reason, *nodes);
    }
    app.dashboard.decisions.filtered(app.now(), &args.pod, &verdicts);
    if verdicts.fitting.is_empty() && verdicts.reasons.contains_key(QUOTA) {
        app.tell_quota(&args.pod, "");
    }
    let outcome = if verdicts.fitting.is_empty() { "none" } else { "some" };
    let answer = match &body {
        Ok(bytes) if args.nodes.is_some() && args.node_names.is_none() => {
            Json(WithWholeNodes::new(&verdicts, bytes)).into_response()
        }
        _ => Json(&verdicts).into_response(),
    };
    app.metrics.answered("filter", outcome, begun.elapsed());
    answer
}

pub(super) async fn prioritize(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    let begun = Instant::now();
    let (outcome, answer) = match read::<ExtenderArgs<BorrowedName<'_>>>(&app, &body) {
        Ok(args) => ("ok", Json(app.read().prioritize(&args, &app.verdicts)).into_response()),
        // There is no place for an error, and kube-scheduler would not show it.
        Err(_) => ("error", Json([(); 0]).into_response()),
    };
    app.metrics.answered("prioritize", outcome, begun.elapsed());
    answer
}

pub(super) async fn preempt(FromApp(app): FromApp<Arc<App>>, body: Body) -> Json<PreemptionResult> {
    let begun = Instant::now();
    let (outcome, result) = match read::<PreemptionArgs>(&app, &body) {
        Ok(args) => {
            let result = app.preempt(&args).await;
            let state = app.read();
            let is_over_quota = result.node_name_to_meta_victims.is_empty() && state.is_over_quota(&args);
            app.dashboard.decisions.preempted(app.now(), &args.pod, &result, &state);
            drop(state);
            if is_over_quota {
                app.tell_quota(&args.pod, "; no pod of lower priority of this namespace makes room for it");
            }
            ("ok", result)
        }
        Err(_) => ("error", PreemptionResult::default()),
    };
    app.metrics.answered("preempt", outcome, begun.elapsed());
    Json(result)
}

impl App {
    /// Whom to evict, with the state lent for one node at a time: a crowded one takes milliseconds, and hundreds may be asked about.
    async fn preempt(&self, args: &PreemptionArgs) -> PreemptionResult {
        let mut result = PreemptionResult::default();
        let Ok(ask) = ParsedPod::of(&*self.read(), &args.pod) else { return result };
        for (node, proposed) in args.proposals() {
            let chosen = self.read().preempt_on(node, &ask, args.pod.spec.priority, proposed);
            result.node_name_to_meta_victims.extend(chosen.map(|chosen| (node.to_owned(), chosen)));
            tokio::task::yield_now().await;
        }
        result
    }

    /// Tells what the quota leaves, which no answer to kube-scheduler has room for.
    fn tell_quota(&self, pod: &Pod, more: &str) {
        if !self.notices.are_on() {
            return;
        }
        let Some(held) = self.read().describe_quota(&pod.metadata.namespace) else { return };
        let meta = &pod.metadata;
        let message = format!("the quota does not allow it on any node: {held}{more}");
        self.tell((&meta.namespace, &meta.name, &meta.uid), NoticeReason::QuotaExceeded, message);
    }
}

/// The answer to a question with whole nodes gives them back untouched: kube-scheduler goes on with what it gets.
struct WithWholeNodes<'a> {
    nodes: RawList<'a>,
    verdicts: &'a Verdicts<'a>,
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

impl<'a> WithWholeNodes<'a> {
    fn new(verdicts: &'a Verdicts<'a>, bytes: &'a [u8]) -> Self {
        // It was read before, so it can be read again.
        let mut nodes =
            serde_json::from_slice::<RawArgs<'_>>(bytes).map(|args| args.nodes).unwrap_or_default();
        let fitting: HashSet<&str> = verdicts.fitting.iter().copied().collect();
        nodes.items.retain(|item| {
            serde_json::from_str::<Named>(item.get())
                .is_ok_and(|node| fitting.contains(node.metadata.name.as_str()))
        });
        Self { nodes, verdicts }
    }
}

impl Serialize for WithWholeNodes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.verdicts.serialize_with(Some(&self.nodes), serializer)
    }
}
