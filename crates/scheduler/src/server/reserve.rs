//! Filter as the only verb, as gpu-admission is configured: kube-scheduler binds the pod itself, so filter chooses
//! node and GPUs, writes them to the pod and books them.
//!
//! The booking ends when the watch shows the pod on its node, or after the time that Bindings with an unknown outcome
//! have. If kube-scheduler filters the pod again, its attempt has failed, but the Binding may be stored all the same:
//! the attempt then gets the same GPUs, or the booking stays in doubt beside the one on another node.

use std::sync::Arc;

use tessera_cluster::{AnnotateError, annotate_pod, with_causes};
use tessera_core::units::PodUid;
use tessera_wire::foreign::extender::{BindingArgs, BorrowedName, ExtenderArgs};
use tessera_wire::foreign::objects::Pod;

use super::bind::{API_TIMEOUT, BindFailure};
use super::{App, RequestAborted};
use crate::notices::NoticeReason;
use crate::state::{BindOrder, BindOutcome};
use crate::verb::filter::FilterVerdicts;

/// The reason why no GPUs were reserved. kube-scheduler gets the text and retries the pod.
#[derive(Debug, thiserror::Error)]
enum ReserveFailure {
    #[error(transparent)]
    Booking(#[from] BindFailure),
    #[error("cannot write the chosen GPUs to the pod: {}", with_causes(.0))]
    Annotations(AnnotateError),
    #[error(
        "cannot write the chosen GPUs to the pod: {}; the filter verb /scheduler/predicates needs the rights of \
         deploy/scheduler/filter-only.yaml: apply that file, or configure the verbs /scheduler/filter and bind",
        with_causes(.0)
    )]
    Forbidden(AnnotateError),
    #[error("cannot write the chosen GPUs to the pod: {0}")]
    Aborted(RequestAborted),
    #[error("the call was interrupted by an internal error; the log has the cause")]
    Interrupted,
}

/// Returns the node of the pod's last attempt if its GPUs are still reserved. The pod is annotated with them already.
pub(super) fn repeat_reservation<'a>(app: &App, args: &'a ExtenderArgs<BorrowedName<'_>>) -> Option<&'a str> {
    if !app.may_write() {
        return None;
    }
    let uid = PodUid(args.pod.metadata.uid.clone());
    app.write().repeat_reservation(&uid, args.names(), app.now())
}

/// Narrows the verdicts to the best node and reserves the pod's GPUs there. Without a fitting node nothing changes.
pub(super) async fn reserve(app: &Arc<App>, pod: &Pod, verdicts: &mut FilterVerdicts<'_>) {
    let Some(node) = verdicts.best.filter(|_| pod.spec.asks_for_gpus()) else { return };
    let args = BindingArgs {
        pod_name: pod.metadata.name.clone(),
        pod_namespace: pod.metadata.namespace.clone(),
        pod_uid: pod.metadata.uid.clone(),
        node: node.to_owned(),
    };
    // A separate task, so that the booking is confirmed or released even if kube-scheduler closes the connection.
    let worker = Arc::clone(app);
    let reserved = tokio::spawn(async move { worker.reserve(&args).await }).await;
    match reserved.unwrap_or(Err(ReserveFailure::Interrupted)) {
        Ok(()) => verdicts.narrow_to(node),
        Err(failure) => {
            tracing::info!(%failure, pod = %format_args!("{}/{}", pod.metadata.namespace, pod.metadata.name),
                "no GPUs were reserved; kube-scheduler will retry");
            verdicts.fail(failure.to_string());
        }
    }
}

impl App {
    async fn reserve(&self, args: &BindingArgs) -> Result<(), ReserveFailure> {
        if !self.may_write() {
            return Err(BindFailure::NotLeading.into());
        }
        // An earlier attempt has bound the pod, and kube-scheduler has not seen that yet.
        // kube-scheduler waits for this answer and can place no other pod meanwhile, so the Binding is not delayed.
        let Some(BindOrder { annotations, chosen, why, .. }) = self.book(args).await? else { return Ok(()) };
        let uid = PodUid(args.pod_uid.clone());
        let pod = (args.pod_namespace.as_str(), args.pod_name.as_str(), args.pod_uid.as_str());
        let written = annotate_pod(&self.client, pod, &annotations);
        let failure = match self.while_leading(API_TIMEOUT, written).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) if error.is_forbidden() => Some(ReserveFailure::Forbidden(error)),
            Ok(Err(error)) => Some(ReserveFailure::Annotations(error)),
            Err(aborted) => Some(ReserveFailure::Aborted(aborted)),
        };
        match failure {
            None => {
                self.write().keep_reservation(&uid, self.now());
                self.notify(pod, NoticeReason::GpusChosen, format!("{chosen}: {why}"));
                Ok(())
            }
            // kube-scheduler binds only after an answer without an error, so the GPUs are free whatever was written.
            Some(failure) => {
                self.write().end_bind(&uid, BindOutcome::Refused, self.now());
                Err(failure)
            }
        }
    }
}
