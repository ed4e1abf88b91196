//! An API server in memory: lists and watches with resource versions, patches, bindings, leases and
//! tables.
//!
//! It implements as much of the real API server as Tessera, kube-rs and kubectl use, with the same
//! messages. Tests and the demo use it in place of a cluster.
//!
//! [`conformance`] holds requests and the answers of a real API server. The same requests run
//! against both servers.

mod clock;
pub mod conformance;
mod http;
mod kinds;
mod names;
mod patch;
mod path;
mod pods;
mod protobuf;
mod selector;
mod status;
mod store;
mod table;
mod watch;
mod write;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub(crate) use self::clock::now;
pub use self::pods::pod_path;
pub use self::write::BindingFault;
use self::{
    path::ObjectPath,
    selector::Selector,
    status::Problem,
    store::{Store, StoredObject, Subscription},
    write::Deletion,
};

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct ApiServer {
    store: Arc<Store>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

/// Namespaces that every cluster has.
const NAMESPACES: [&str; 4] = ["default", "kube-node-lease", "kube-public", "kube-system"];

impl ApiServer {
    /// Starts a server on a free port of the loopback interface.
    pub async fn start() -> io::Result<Self> {
        Self::start_on(TcpListener::bind("127.0.0.1:0").await?)
    }

    fn start_on(listener: TcpListener) -> io::Result<Self> {
        let store = Arc::<Store>::default();
        let address = listener.local_addr()?;
        let router = http::router(Arc::clone(&store));
        let task = tokio::spawn(async move {
            // The server ends when the task drops its listener.
            let _ = axum::serve(listener, router).await;
        });
        let server = Self { store, address, task };
        for name in NAMESPACES {
            // The store is empty, so creating a namespace cannot fail.
            let _ = server.create("/api/v1/namespaces", json!({ "metadata": { "name": name } }));
        }
        Ok(server)
    }

    /// Returns the base URL of the server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a kubeconfig for this server.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        let named = |what: &str, inner: Value| json!([{ "name": "tessera-demo", what: inner }]);
        // Every JSON document is also a YAML document.
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "tessera-demo",
            "clusters": named("cluster", json!({ "server": self.url() })),
            "users": named("user", json!({})),
            "contexts": named("context", json!({ "cluster": "tessera-demo", "user": "tessera-demo" })),
        });
        format!("{config:#}\n")
    }

    /// Ends every watch and answers every request with 503, like a server that is down behind its
    /// load balancer, until [`ApiServer::bring_up`].
    pub fn take_down(&self) {
        self.store.set_down(true);
    }

    /// Answers requests again after [`ApiServer::take_down`]. All objects are still there.
    pub fn bring_up(&self) {
        self.store.set_down(false);
    }

    /// Accepts requests without answering them, like an overloaded server, until
    /// [`ApiServer::release_requests`].
    pub fn hold_requests(&self) {
        self.store.hold(true);
    }

    /// Answers all requests held since [`ApiServer::hold_requests`].
    pub fn release_requests(&self) {
        self.store.hold(false);
    }

    /// Returns the number of requests that wait for an answer.
    #[must_use]
    pub fn waiting_requests(&self) -> usize {
        self.store.waiting()
    }

    /// Makes the next bindings fail with these faults, in this order. Later bindings succeed or
    /// fail on their own.
    pub fn fail_bindings(&self, faults: impl IntoIterator<Item = BindingFault>) {
        self.store.lock().faults.extend(faults);
    }

    /// Drops the change history, so that every watch must list again.
    pub fn compact(&self) {
        self.store.compact();
    }

    /// Creates an object, like `POST` on a path such as `/api/v1/namespaces/default/pods`. Creates
    /// its namespace first if that is missing.
    pub fn create(&self, path: &str, object: Value) -> Result<Value, Value> {
        let target = target(path)?;
        if !target.namespace.is_empty() {
            let namespace = json!({ "metadata": { "name": target.namespace } });
            // The namespace may exist already.
            let _ = self.create("/api/v1/namespaces", namespace);
        }
        value(self.store.create(&target, object))
    }

    /// Reads an object, like `GET`.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.store.get(&ObjectPath::parse(path)?).ok().map(|object| object.value())
    }

    /// Applies a strategic merge patch. A path that ends in `/status` patches the status.
    pub fn patch(&self, path: &str, patch: &Value) -> Result<Value, Value> {
        value(self.store.patch(&target(path)?, patch, patch::PatchKind::Strategic))
    }

    /// Deletes an object at once, like `DELETE` with a grace period of zero.
    pub fn delete(&self, path: &str) -> Result<Value, Value> {
        value(self.store.delete(&target(path)?, &Deletion { grace: Some(0), uid: None }))
    }

    /// Deletes an object like `DELETE`: a pod keeps its termination grace period.
    pub fn delete_gently(&self, path: &str) -> Result<Value, Value> {
        value(self.store.delete(&target(path)?, &Deletion::default()))
    }

    /// Binds a pod, like `POST` on a path that ends in `/binding`.
    pub fn bind(&self, path: &str, binding: &Value) -> Result<(), Value> {
        self.store.bind(&target(path)?, binding).map_err(Problem::into_body)
    }

    /// Returns all objects of a path such as `/api/v1/pods`.
    #[must_use]
    pub fn list(&self, path: &str) -> Vec<Value> {
        let Some(target) = ObjectPath::parse(path) else { return Vec::new() };
        let selector = Selector::of_namespace(&target.namespace);
        let page = self.store.list(target.kind, &selector, None, usize::MAX);
        page.items.iter().map(|object| object.value()).collect()
    }

    /// Returns the number of objects that a field selector matches.
    #[must_use]
    pub fn count(&self, path: &str, fields: &str) -> usize {
        let Some(target) = ObjectPath::parse(path) else { return 0 };
        let selector = Selector::parse(target.kind, &target.namespace, fields, "");
        selector.map_or(0, |selector| self.store.list(target.kind, &selector, None, usize::MAX).items.len())
    }

    /// Watches the objects that a field selector matches: first all that exist, then every change.
    /// A client that lists and watches over the network receives the same.
    pub fn watch(&self, path: &str, fields: &str) -> Result<ObjectWatch, Value> {
        let target = target(path)?;
        let selector = Selector::parse(target.kind, &target.namespace, fields, "");
        let subscription = selector.and_then(|selector| self.store.watch(target.kind, selector, None));
        let Subscription { backlog, queue } = subscription.map_err(Problem::into_body)?;
        Ok(ObjectWatch { backlog: backlog.into_iter(), queue })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A watch on objects of one kind.
#[derive(Debug)]
pub struct ObjectWatch {
    backlog: std::vec::IntoIter<store::StoreEvent>,
    queue: tokio::sync::mpsc::UnboundedReceiver<store::StoreEvent>,
}

/// A change that a watch delivers.
#[derive(Debug, Clone, PartialEq)]
pub enum ObjectChange {
    /// The object was added or modified.
    Applied(Value),
    /// The object was deleted, or the selector no longer matches it.
    Deleted(Value),
}

impl ObjectWatch {
    /// Waits for the next event. Returns `None` when the server closes the watch.
    pub async fn next(&mut self) -> Option<ObjectChange> {
        let event = match self.backlog.next() {
            Some(event) => event,
            None => self.queue.recv().await?,
        };
        Some(ObjectChange::of(&event))
    }

    /// Returns the next event if one is queued already.
    pub fn try_next(&mut self) -> Option<ObjectChange> {
        let event = self.backlog.next().or_else(|| self.queue.try_recv().ok())?;
        Some(ObjectChange::of(&event))
    }
}

impl ObjectChange {
    fn of(event: &store::StoreEvent) -> Self {
        let object = event.object.value();
        if event.kind == "DELETED" { Self::Deleted(object) } else { Self::Applied(object) }
    }
}

fn target(path: &str) -> Result<ObjectPath, Value> {
    ObjectPath::parse(path).ok_or_else(|| Problem::no_such_path().into_body())
}

fn value(outcome: Result<Arc<StoredObject>, Problem>) -> Result<Value, Value> {
    outcome.map(|object| object.value()).map_err(Problem::into_body)
}
