//! The verb `bind`: books the GPUs, sends the Binding, and confirms or rolls back the booking.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State as FromApp;
use tessera_cluster::{BindError, Binding, GetError, get_pod, with_causes};
use tessera_core::units::PodUid;
use tessera_wire::foreign::extender::{BindingArgs, BindingResult};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::grant;

use super::App;
use super::claims::ClaimFailure;
use super::extender::{BadCall, Body, read};
use crate::notices::NoticeReason;
use crate::state::{BindOrder, BindOutcome, BindRefusal, BindStep, ClaimRefusal};

/// Timeout of a call to the API server. A Binding is also aborted before another replica may take
/// over.
pub(super) const API_TIMEOUT: Duration = Duration::from_secs(3);

/// The reason why a pod was not bound. kube-scheduler gets the text.
#[derive(Debug, thiserror::Error)]
pub(super) enum BindFailure {
    #[error(transparent)]
    Call(#[from] BadCall),
    #[error("this replica may not bind now: it is not the leader, or cannot renew its lease")]
    NotLeading,
    #[error(transparent)]
    Refused(#[from] BindRefusal),
    #[error(transparent)]
    Claims(Box<ClaimRefusal>),
    #[error(transparent)]
    Claim(#[from] ClaimFailure),
    #[error("pod {namespace}/{name} with UID {uid} no longer exists")]
    PodGone { namespace: String, name: String, uid: String },
    #[error(transparent)]
    Read(#[from] GetError),
    #[error("the API server did not answer in time")]
    ReadTimeout,
    #[error("{}", with_causes(.0))]
    Binding(BindError),
    #[error("the API server did not accept the binding in time")]
    BindingTimeout,
    #[error("the bind was interrupted by an internal error; the log has the cause")]
    Interrupted,
}

pub(super) async fn bind(FromApp(app): FromApp<Arc<App>>, body: Body) -> Json<BindingResult> {
    let begun = Instant::now();
    let outcome = match read::<BindingArgs>(&app, &body) {
        // A separate task, so that the bind finishes even if kube-scheduler closes the connection.
        Ok(args) => {
            let worker = Arc::clone(&app);
            let bound = tokio::spawn(async move {
                let outcome = worker.bind(&args).await;
                let decided = outcome.as_deref().map_err(|failure| failure as &dyn Display);
                worker.dashboard.decisions.bound(worker.now(), &args, decided, &worker.read());
                outcome
            })
            .await;
            bound.unwrap_or(Err(BindFailure::Interrupted))
        }
        Err(bad) => Err(bad.into()),
    };
    app.metrics.answered("bind", if outcome.is_ok() { "ok" } else { "error" }, begun.elapsed());
    let error = outcome.err().map(|failure| failure.to_string());
    if let Some(error) = &error {
        tracing::info!(error, "the pod was not bound; kube-scheduler will retry");
    }
    Json(BindingResult { error: error.unwrap_or_default() })
}

impl App {
    /// Binds the pod. Returns the reason for the choice of GPUs, or an empty text if the pod was
    /// bound before.
    async fn bind(&self, args: &BindingArgs) -> Result<String, BindFailure> {
        if !self.may_write() {
            return Err(BindFailure::NotLeading);
        }
        if self.may_use_claims(args)
            && let Some(why) = self.bind_with_claims(args).await?
        {
            return Ok(why);
        }
        let Some(BindOrder { annotations, chosen, why, not_before }) = self.book(args).await? else {
            return Ok(String::new());
        };
        self.wait_until(not_before).await;
        // Reading the pod and waiting took time. The lease must still be valid when the Binding is sent.
        if !self.may_write() {
            self.write().end_bind(&PodUid(args.pod_uid.clone()), BindOutcome::Refused, self.now());
            return Err(BindFailure::NotLeading);
        }
        let (outcome, failure) = self.send(args, annotations).await;
        self.metrics.bound(match outcome {
            BindOutcome::Bound => "bound",
            BindOutcome::Refused => "refused",
            BindOutcome::Unknown => "unknown",
        });
        self.write().end_bind(&PodUid(args.pod_uid.clone()), outcome, self.now());
        if !chosen.is_empty() {
            let error = failure.as_ref().map(ToString::to_string).unwrap_or_default();
            self.notify_outcome(args, outcome, format!("{chosen}: {why}"), &error);
        }
        failure.map_or(Ok(why), Err)
    }

    /// Waits until the Binding of a booked pod may be sent.
    pub(super) async fn wait_until(&self, not_before: Option<Duration>) {
        if let Some(at) = not_before {
            tokio::time::sleep(at.saturating_sub(self.now().steady)).await;
        }
    }

    pub(super) fn notify_outcome(
        &self,
        args: &BindingArgs,
        outcome: BindOutcome,
        chosen: String,
        error: &str,
    ) {
        let pod = (args.pod_namespace.as_str(), args.pod_name.as_str(), args.pod_uid.as_str());
        match outcome {
            BindOutcome::Bound => self.notify(pod, NoticeReason::GpusChosen, chosen),
            BindOutcome::Refused => {
                let message = format!("{error}; the GPUs are free again. The choice was: {chosen}");
                self.notify(pod, NoticeReason::BindingFailed, message);
            }
            BindOutcome::Unknown => {
                let message = format!(
                    "{error}; the outcome is unknown, so the GPUs stay reserved until the API server reports it. The choice was: {chosen}"
                );
                self.notify(pod, NoticeReason::BindingFailed, message);
            }
        }
    }

    /// Books the pod's GPUs. Returns the Binding to send, or `None` if the pod is bound already.
    pub(super) async fn book(&self, args: &BindingArgs) -> Result<Option<BindOrder>, BindFailure> {
        let step = self.write().begin_bind(args, self.now())?;
        match step {
            BindStep::Done => Ok(None),
            BindStep::Send(order) => Ok(Some(order)),
            BindStep::Fetch => {
                let read_at = self.read().list_generation();
                let pod = self.fetch(args).await?;
                Ok(self.write().begin_bind_with(pod, read_at, args, self.now())?)
            }
        }
    }

    /// Reads a pod from the API server that the watch has not shown yet.
    pub(super) async fn fetch(&self, args: &BindingArgs) -> Result<Pod, BindFailure> {
        let found = self.get(args).await?.filter(|pod| pod.metadata.uid == args.pod_uid);
        found.ok_or_else(|| BindFailure::PodGone {
            namespace: args.pod_namespace.clone(),
            name: args.pod_name.clone(),
            uid: args.pod_uid.clone(),
        })
    }

    async fn get(&self, args: &BindingArgs) -> Result<Option<Pod>, BindFailure> {
        let asked = get_pod(&self.client, &args.pod_namespace, &args.pod_name);
        match tokio::time::timeout(API_TIMEOUT, asked).await {
            Ok(found) => Ok(found?),
            Err(_) => Err(BindFailure::ReadTimeout),
        }
    }

    pub(super) async fn send(
        &self,
        args: &BindingArgs,
        annotations: BTreeMap<String, String>,
    ) -> (BindOutcome, Option<BindFailure>) {
        let granted = annotations.get(grant::KEY).cloned();
        let binding = Binding {
            namespace: args.pod_namespace.clone(),
            pod: args.pod_name.clone(),
            uid: args.pod_uid.clone(),
            node: args.node.clone(),
            annotations,
        };
        match self.while_leading(API_TIMEOUT, binding.send(&self.client)).await {
            Ok(Ok(())) => (BindOutcome::Bound, None),
            Ok(Err(error @ BindError::Conflict(_))) => self.after_conflict(args, granted, error).await,
            Ok(Err(error)) => {
                let outcome =
                    if error.may_have_been_applied() { BindOutcome::Unknown } else { BindOutcome::Refused };
                (outcome, Some(BindFailure::Binding(error)))
            }
            Err(_) => (BindOutcome::Unknown, Some(BindFailure::BindingTimeout)),
        }
    }

    /// Handles a conflict. The pod may be bound by an earlier attempt whose answer was lost, which
    /// is a success.
    async fn after_conflict(
        &self,
        args: &BindingArgs,
        granted: Option<String>,
        error: BindError,
    ) -> (BindOutcome, Option<BindFailure>) {
        let read_at = self.read().list_generation();
        match self.get(args).await {
            Ok(Some(pod)) => {
                let is_it = pod.metadata.uid == args.pod_uid && pod.spec.node_name == args.node;
                let as_granted = pod.metadata.annotations.get(grant::KEY) == granted.as_ref();
                let known = pod.metadata.uid == args.pod_uid;
                if known {
                    self.write().apply_read(pod, read_at);
                }
                if is_it && as_granted {
                    return (BindOutcome::Bound, None);
                }
                (BindOutcome::Refused, Some(BindFailure::Binding(error)))
            }
            Ok(None) => (BindOutcome::Refused, Some(BindFailure::Binding(error))),
            Err(unanswered) => (BindOutcome::Unknown, Some(unanswered)),
        }
    }
}
