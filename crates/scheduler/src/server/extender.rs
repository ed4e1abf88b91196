//! The verbs that kube-scheduler calls. Every answer has the form of the extender API, even after
//! bad input.

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
use tessera_core::admission::QUOTA;
use tessera_core::units::PodUid;
use tessera_wire::bounded::Counted;
use tessera_wire::foreign::extender::{
    BorrowedName, ExtenderArgs, FilterResult, PreemptionArgs, PreemptionResult,
};
use tessera_wire::foreign::objects::Pod;

use super::reserve::{repeat_reservation, reserve};
use super::{App, Caller};
use crate::notices::NoticeReason;
use crate::verb::filter::FilterVerdicts;
use crate::verb::{gang, preempt};

/// The request body, or why it could not be received.
pub(super) type Body = Result<Bytes, BytesRejection>;

/// The reason why a call is not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadCall {
    #[error("this replica of the scheduler is not the leader, or has not read the cluster yet")]
    NotReady,
    /// The body could not be received.
    #[error("{0}")]
    Body(String),
    #[error("cannot parse the request: {0}")]
    Json(serde_json::Error),
}

/// Parses the body of a verb. Fails if this replica is not ready.
pub(super) fn read<'b, T: Deserialize<'b>>(app: &App, body: &'b Body) -> Result<Counted<T>, BadCall> {
    read_of(Caller::KubeScheduler, app, body)
}

/// Parses the body of a call by this caller. Fails if this replica is not ready.
pub(super) fn read_of<'b, T: Deserialize<'b>>(
    caller: Caller,
    app: &App,
    body: &'b Body,
) -> Result<Counted<T>, BadCall> {
    if !app.is_ready() {
        return Err(BadCall::NotReady);
    }
    let bytes = body.as_ref().map_err(|rejection| BadCall::Body(rejection.body_text()))?;
    app.parse(caller, bytes).map_err(BadCall::Json)
}

pub(super) async fn filter(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    filtered(&app, &body, false).await
}

/// Filters for a kube-scheduler that calls no other verb.
pub(super) async fn filter_and_reserve(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    filtered(&app, &body, true).await
}

async fn filtered(app: &Arc<App>, body: &Body, reserves: bool) -> Response {
    let begun = Instant::now();
    let args: Counted<ExtenderArgs<BorrowedName<'_>>> = match read(app, body) {
        Ok(args) => args,
        Err(error) => {
            app.metrics.answered("filter", "error", begun.elapsed());
            let error = error.to_string();
            return Json(FilterResult { error, ..FilterResult::default() }).into_response();
        }
    };
    let repeated = if reserves { repeat_reservation(app, &args) } else { None };
    let verdicts = match repeated {
        Some(node) => FilterVerdicts::only(node),
        None => {
            let mut verdicts = judge(app, &args);
            if verdicts.fit == 0 && app.retry_wait.wait_for_change(&args.pod.metadata.uid).await {
                verdicts = judge(app, &args);
            }
            if reserves {
                reserve(app, &args.pod, &mut verdicts).await;
            } else if let Some(node) = verdicts.to_reserve
                && app.may_write()
                && app.write().reserve_passed(&args.pod, node, app.now())
            {
                verdicts.narrow_to(node);
            }
            verdicts
        }
    };
    for (reason, nodes) in &verdicts.reasons {
        app.metrics.refused(reason, *nodes);
    }
    app.dashboard.decisions.filtered(app.now(), &args.pod, &verdicts);
    if verdicts.fitting.is_empty() && verdicts.reasons.contains_key(QUOTA) {
        app.notify_quota(&args.pod, "");
    }
    let outcome = if verdicts.fitting.is_empty() { "none" } else { "some" };
    let answer = match body {
        Ok(bytes) if args.nodes.is_some() && args.node_names.is_none() => {
            Json(WithWholeNodes::new(&verdicts, bytes)).into_response()
        }
        _ => Json(&verdicts).into_response(),
    };
    app.metrics.answered("filter", outcome, begun.elapsed());
    answer
}

/// Judges the nodes of a call. Pods of gangs need the state for writing, because filter reserves their GPUs.
fn judge<'a>(app: &App, args: &'a ExtenderArgs<BorrowedName<'_>>) -> FilterVerdicts<'a> {
    if gang::is_in_gang(&args.pod) && app.may_write() {
        let verdicts = app.write().filter_member(args, app.now());
        if let Some(verdicts) = verdicts {
            return verdicts;
        }
    }
    let mut state = app.read();
    let uid = PodUid(args.pod.metadata.uid.clone());
    if state.is_passed(&uid) {
        drop(state);
        app.write().release_passed(&uid);
        state = app.read();
    }
    if let Some(node) = state.reserved_node(args) {
        return FilterVerdicts::only(node);
    }
    let mut verdicts = state.filter(args, &app.verdicts);
    let priority = args.pod.spec.priority.unwrap_or(0);
    if verdicts.fit == 0 && state.yields_hold_back(priority) && app.may_write() {
        drop(state);
        app.write().yield_hold_back(priority);
        state = app.read();
        verdicts = state.filter(args, &app.verdicts);
    }
    if verdicts.fit == 0
        && let Some(error) = state.waits_for_reservation(args)
    {
        verdicts.fail(error);
    }
    verdicts
}

pub(super) async fn prioritize(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    let begun = Instant::now();
    let (outcome, answer) = match read::<ExtenderArgs<BorrowedName<'_>>>(&app, &body) {
        Ok(args) => ("ok", Json(app.read().prioritize(&args, &app.verdicts)).into_response()),
        // The answer has no field for an error.
        Err(_) => ("error", Json([(); 0]).into_response()),
    };
    app.metrics.answered("prioritize", outcome, begun.elapsed());
    answer
}

pub(super) async fn preempt(FromApp(app): FromApp<Arc<App>>, body: Body) -> Json<PreemptionResult> {
    let begun = Instant::now();
    let (outcome, result) = match read::<PreemptionArgs>(&app, &body) {
        Ok(args) => {
            let (args, result) = choose_victims(&app, args).await;
            let state = app.read();
            let is_over_quota = result.node_name_to_meta_victims.is_empty() && state.is_over_quota(&args);
            app.dashboard.decisions.preempted(app.now(), &args.pod, &result, &state);
            drop(state);
            if is_over_quota {
                app.notify_quota(&args.pod, "; no pod of lower priority of this namespace makes room for it");
            }
            ("ok", result)
        }
        Err(_) => ("error", PreemptionResult::default()),
    };
    app.metrics.answered("preempt", outcome, begun.elapsed());
    Json(result)
}

/// Runs the preemption on a blocking thread, because a crowded node takes milliseconds.
async fn choose_victims(
    app: &Arc<App>,
    args: Counted<PreemptionArgs>,
) -> (Arc<Counted<PreemptionArgs>>, PreemptionResult) {
    let (worker, args) = (Arc::clone(app), Arc::new(args));
    let shared = Arc::clone(&args);
    let chosen = tokio::task::spawn_blocking(move || preempt::preempt(&*worker, &shared)).await;
    (args, chosen.unwrap_or_default())
}

impl App {
    /// Writes an event with the usage of the quota, because the answer to kube-scheduler has no
    /// room for it.
    fn notify_quota(&self, pod: &Pod, more: &str) {
        if !self.notices.are_on() {
            return;
        }
        let Some(held) = self.read().describe_quota(&pod.metadata.namespace) else { return };
        let meta = &pod.metadata;
        let message = format!("the quota does not allow it on any node: {held}{more}");
        self.notify((&meta.namespace, &meta.name, &meta.uid), NoticeReason::QuotaExceeded, message);
    }
}

/// The answer to a call with whole node objects. It returns them unchanged, because kube-scheduler
/// continues with the objects that it gets.
struct WithWholeNodes<'a> {
    nodes: RawList<'a>,
    verdicts: &'a FilterVerdicts<'a>,
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
    fn new(verdicts: &'a FilterVerdicts<'a>, bytes: &'a [u8]) -> Self {
        // The handler has parsed these bytes before, so this cannot fail.
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
