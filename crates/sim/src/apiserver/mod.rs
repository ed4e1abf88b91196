//! An API server in memory: lists and watches with resource versions, patches, bindings, leases. As much of the real one
//! as Tessera uses, in its words, for tests and demonstrations without a cluster.

mod http;
mod patch;
mod path;
mod status;
mod store;
mod watch;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub use self::store::Fault;
use self::{path::Target, status::Problem, store::Store};

/// A running server. Ends when dropped.
#[derive(Debug)]
pub struct ApiServer {
    store: Arc<Store>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl ApiServer {
    /// Starts one on a free port of this machine.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let store = Arc::<Store>::default();
        let address = listener.local_addr()?;
        let router = http::router(Arc::clone(&store));
        let task = tokio::spawn(async move {
            // It ends with the listener, which ends with the task.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { store, address, task })
    }

    /// Where clients find it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
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

    /// What becomes of the next bindings, in this order; those after them succeed or fail on their own.
    pub fn fail_bindings(&self, faults: impl IntoIterator<Item = Fault>) {
        self.store.fail_bindings(faults);
    }

    /// Forgets what watches could resume from: the next ones are told to list anew.
    pub fn compact(&self) {
        self.store.compact();
    }

    /// Makes an object, as `POST` on a path such as `/api/v1/namespaces/default/pods` would.
    pub fn create(&self, path: &str, object: Value) -> Result<Value, Value> {
        let target = Target::parse(path).ok_or_else(|| Problem::no_such_path().into_body())?;
        self.store.create(&target, object).map_err(Problem::into_body)
    }

    /// Reads an object, as `GET` would.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.store.get(&Target::parse(path)?).ok()
    }

    /// Changes an object, as a merge patch would; on a path that ends in `/status`, its status.
    pub fn patch(&self, path: &str, patch: &Value) -> Result<Value, Value> {
        let target = Target::parse(path).ok_or_else(|| Problem::no_such_path().into_body())?;
        self.store.patch(&target, patch, patch::Kind::Merge).map_err(Problem::into_body)
    }

    /// Deletes an object at once, as `DELETE` without a grace period would.
    pub fn delete(&self, path: &str) -> Result<Value, Value> {
        let target = Target::parse(path).ok_or_else(|| Problem::no_such_path().into_body())?;
        self.store.delete(&target, Some(0)).map_err(Problem::into_body)
    }

    /// All objects of a kind, such as `/api/v1/pods`.
    #[must_use]
    pub fn list(&self, path: &str) -> Vec<Value> {
        Target::parse(path).map(|target| self.store.list(&target).1).unwrap_or_default()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}
