//! An API server in memory: lists and watches with resource versions, patches, bindings, leases, tables. As much of the real
//! one as Tessera, kube-rs and kubectl use, in its words, for tests and demonstrations without a cluster.
//!
//! [`conformance`] holds requests and what a real API server answers; they are tried on both.

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
pub use self::write::Fault;
use self::{
    path::Target,
    selector::Selector,
    status::Problem,
    store::{Store, Stored, Watching},
    write::Deletion,
};

/// A running server. Ends when dropped.
#[derive(Debug)]
pub struct ApiServer {
    store: Arc<Store>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

/// The namespaces every cluster has.
const NAMESPACES: [&str; 4] = ["default", "kube-node-lease", "kube-public", "kube-system"];

impl ApiServer {
    /// Starts one on a free port of this machine.
    pub async fn start() -> io::Result<Self> {
        Self::start_on(TcpListener::bind("127.0.0.1:0").await?)
    }

    fn start_on(listener: TcpListener) -> io::Result<Self> {
        let store = Arc::<Store>::default();
        let address = listener.local_addr()?;
        let router = http::router(Arc::clone(&store));
        let task = tokio::spawn(async move {
            // It ends with the listener, which ends with the task.
            let _ = axum::serve(listener, router).await;
        });
        let server = Self { store, address, task };
        for name in NAMESPACES {
            // They are the first objects.
            let _ = server.create("/api/v1/namespaces", json!({ "metadata": { "name": name } }));
        }
        Ok(server)
    }

    /// Where clients find it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What `kubectl --kubeconfig` needs to talk to it.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        let named = |what: &str, inner: Value| json!([{ "name": "tessera-demo", what: inner }]);
        // JSON is YAML.
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "tessera-demo",
            "clusters": named("cluster", json!({ "server": self.url() })),
            "users": named("user", json!({})),
            "contexts": named("context", json!({ "cluster": "tessera-demo", "user": "tessera-demo" })),
        });
        format!("{config:#}\n")
    }

    /// Ends every watch and answers nothing but errors, as a server that is down behind its load balancer, until
    /// [`ApiServer::back`].
    pub fn down(&self) {
        self.store.set_down(true);
    }

    /// Is back, with all it knew.
    pub fn back(&self) {
        self.store.set_down(false);
    }

    /// Takes requests and leaves them unanswered, as a server that is overwhelmed, until [`ApiServer::release`].
    pub fn hold(&self) {
        self.store.hold(true);
    }

    /// Answers all that waited.
    pub fn release(&self) {
        self.store.hold(false);
    }

    /// How many requests wait for an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.store.waiting()
    }

    /// What becomes of the next bindings, in this order; those after them succeed or fail on their own.
    pub fn fail_bindings(&self, faults: impl IntoIterator<Item = Fault>) {
        self.store.lock().faults.extend(faults);
    }

    /// Forgets what watches could resume from: the next ones are told to list anew.
    pub fn compact(&self) {
        self.store.compact();
    }

    /// Makes an object, as `POST` on a path such as `/api/v1/namespaces/default/pods` would, and its namespace if need be.
    pub fn create(&self, path: &str, object: Value) -> Result<Value, Value> {
        let target = target(path)?;
        if !target.namespace.is_empty() {
            let namespace = json!({ "metadata": { "name": target.namespace } });
            // It may be there already.
            let _ = self.create("/api/v1/namespaces", namespace);
        }
        value(self.store.create(&target, object))
    }

    /// Reads an object, as `GET` would.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.store.get(&Target::parse(path)?).ok().map(|object| object.value())
    }

    /// Changes an object, as a strategic merge patch would; on a path that ends in `/status`, its status.
    pub fn patch(&self, path: &str, patch: &Value) -> Result<Value, Value> {
        value(self.store.patch(&target(path)?, patch, patch::Kind::Strategic))
    }

    /// Deletes an object at once, as `DELETE` with a grace period of zero would.
    pub fn delete(&self, path: &str) -> Result<Value, Value> {
        value(self.store.delete(&target(path)?, &Deletion { grace: Some(0), uid: None }))
    }

    /// Deletes an object as `DELETE` would: pods get the time they asked for.
    pub fn delete_gently(&self, path: &str) -> Result<Value, Value> {
        value(self.store.delete(&target(path)?, &Deletion::default()))
    }

    /// Binds a pod, as `POST` on a path that ends in `/binding` would.
    pub fn bind(&self, path: &str, binding: &Value) -> Result<(), Value> {
        self.store.bind(&target(path)?, binding).map_err(Problem::into_body)
    }

    /// All objects of a kind, such as `/api/v1/pods`.
    #[must_use]
    pub fn list(&self, path: &str) -> Vec<Value> {
        let Some(target) = Target::parse(path) else { return Vec::new() };
        let selector = Selector::of_namespace(&target.namespace);
        let page = self.store.list(target.kind, &selector, None, usize::MAX);
        page.items.iter().map(|object| object.value()).collect()
    }

    /// How many objects of a kind a field selector names.
    #[must_use]
    pub fn count(&self, path: &str, fields: &str) -> usize {
        let Some(target) = Target::parse(path) else { return 0 };
        let selector = Selector::parse(target.kind, &target.namespace, fields, "");
        selector.map_or(0, |selector| self.store.list(target.kind, &selector, None, usize::MAX).items.len())
    }

    /// All objects of a kind that a field selector names, then what happens to them: what a client gets that lists and
    /// watches, without the detour over the network.
    pub fn watch(&self, path: &str, fields: &str) -> Result<Watch, Value> {
        let target = target(path)?;
        let selector = Selector::parse(target.kind, &target.namespace, fields, "");
        let watching = selector.and_then(|selector| self.store.watch(target.kind, selector, None));
        let Watching { backlog, queue } = watching.map_err(Problem::into_body)?;
        Ok(Watch { backlog: backlog.into_iter(), queue })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What happens to objects.
#[derive(Debug)]
pub struct Watch {
    backlog: std::vec::IntoIter<store::Event>,
    queue: tokio::sync::mpsc::UnboundedReceiver<store::Event>,
}

/// Something happened to an object.
#[derive(Debug, Clone, PartialEq)]
pub enum Happened {
    /// It is there, or has changed.
    Set(Value),
    /// It is gone, or is not selected any more.
    Gone(Value),
}

impl Watch {
    /// The next one; `None` where the server hung up.
    pub async fn next(&mut self) -> Option<Happened> {
        let event = match self.backlog.next() {
            Some(event) => event,
            None => self.queue.recv().await?,
        };
        Some(Happened::of(&event))
    }

    /// The next one, if there is one already.
    pub fn try_next(&mut self) -> Option<Happened> {
        let event = self.backlog.next().or_else(|| self.queue.try_recv().ok())?;
        Some(Happened::of(&event))
    }
}

impl Happened {
    fn of(event: &store::Event) -> Self {
        let object = event.object.value();
        if event.kind == "DELETED" { Self::Gone(object) } else { Self::Set(object) }
    }
}

fn target(path: &str) -> Result<Target, Value> {
    Target::parse(path).ok_or_else(|| Problem::no_such_path().into_body())
}

fn value(outcome: Result<Arc<Stored>, Problem>) -> Result<Value, Value> {
    outcome.map(|object| object.value()).map_err(Problem::into_body)
}
