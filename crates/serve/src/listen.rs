//! Accepts connections and serves them within the limits of a [`ConnectionTable`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::access::Peer;
use crate::table::{Admission, ConnectionId, ConnectionLimits, ConnectionTable, Phase};
use crate::tls::Tls;

/// Largest request head, and largest buffer of a connection.
const MAX_BUFFER_BYTES: usize = 64 << 10;

/// Pause after a failed accept, because the process may have no free descriptor for a moment.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a listener serves its connections.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The limits of the listener.
    pub limits: ConnectionLimits,
    /// The certificate of the server; plain HTTP without one.
    pub tls: Option<Tls>,
}

/// Serves connections until the listener fails for good. Dropping the future closes all connections.
pub async fn serve(listener: TcpListener, router: Router, options: ServeOptions) -> io::Result<()> {
    let connections = Arc::new(Connections::new(options.limits));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection; continuing with the next one");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // A refused connection is closed by dropping its stream.
        let Some(connection) = connections.admit(peer.ip()) else { continue };
        let _ = stream.set_nodelay(true);
        let (router, options) = (router.clone(), options.clone());
        tasks.spawn(async move {
            let connection = Arc::new(connection);
            let served = Box::pin(converse(stream, router, options.tls, Arc::clone(&connection)));
            connection.run(options.limits, served).await;
        });
    }
}

/// Speaks TLS, if the listener has it, and then HTTP.
async fn converse(stream: TcpStream, router: Router, tls: Option<Tls>, connection: Arc<Open>) {
    let Some(tls) = tls else { return speak_http(stream, router, connection).await };
    match tls.accept(stream).await {
        Ok(stream) => {
            // The client has proven who it is, so it may keep the connection as long as between two requests.
            if tls.checks_clients() {
                connection.set(Phase::Idle);
            }
            speak_http(stream, router, connection).await;
        }
        Err(error) => {
            tracing::debug!(%error, "closing a connection without a TLS session");
        }
    }
}

async fn speak_http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    connection: Arc<Open>,
) {
    let answer = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(connection.peer);
        let (router, connection) = (TowerToHyperService::new(router.clone()), Arc::clone(&connection));
        async move {
            connection.set(Phase::Busy);
            let answered: Result<Response, Infallible> =
                hyper::service::Service::call(&router, request).await;
            answered.map(|response| {
                let is_stream = response.body().size_hint().exact().is_none();
                connection.set(if is_stream { Phase::Streaming } else { Phase::Sending });
                response.map(|body| Body::new(Answer { body, connection }))
            })
        }
    });
    // Connection phases have their own timeouts, so hyper needs none.
    let served = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), answer);
    if let Err(error) = served.await {
        tracing::debug!(%error, "a connection ended");
    }
}

/// The connections of a listener, and a way to close each of them.
#[derive(Debug)]
struct Connections(Mutex<Table>);

#[derive(Debug)]
struct Table {
    table: ConnectionTable,
    phases: HashMap<ConnectionId, watch::Sender<Option<Phase>>>,
}

/// An open connection. It leaves the table when it is dropped.
#[derive(Debug)]
struct Open {
    id: ConnectionId,
    peer: Peer,
    connections: Arc<Connections>,
    /// The phase of the connection; `None` when it has to be closed.
    phase: watch::Receiver<Option<Phase>>,
}

impl Connections {
    fn new(limits: ConnectionLimits) -> Self {
        Self(Mutex::new(Table { table: ConnectionTable::new(limits), phases: HashMap::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<Open> {
        let mut table = self.lock();
        let Admission::Admitted { id, closed } = table.table.admit(peer) else { return None };
        if let Some(other) = closed.and_then(|id| table.phases.remove(&id)) {
            other.send_replace(None);
        }
        let (sender, phase) = watch::channel(Some(Phase::Opening));
        table.phases.insert(id, sender);
        Some(Open { id, peer: Peer::of(peer), connections: Arc::clone(self), phase })
    }
}

impl Open {
    fn set(&self, phase: Phase) {
        let mut table = self.connections.lock();
        table.table.set_phase(self.id, phase);
        if let Some(sender) = table.phases.get(&self.id) {
            sender.send_replace(Some(phase));
        }
    }

    /// Runs the connection until it ends, has to be closed, or exceeds the time of its phase.
    async fn run(&self, limits: ConnectionLimits, mut served: Pin<Box<impl Future<Output = ()>>>) {
        let mut phase = self.phase.clone();
        loop {
            let current = *phase.borrow_and_update();
            let timeout = match current {
                Some(Phase::Opening) => Some(limits.head_timeout),
                Some(Phase::Idle | Phase::Sending) => Some(limits.idle_timeout),
                Some(Phase::Streaming | Phase::Busy) => None,
                None => return,
            };
            let expired = async {
                match timeout {
                    Some(timeout) => tokio::time::sleep(timeout).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut served => return,
                () = expired => return,
                changed = phase.changed() => if changed.is_err() { return },
            }
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut table = self.connections.lock();
        table.table.remove(self.id);
        table.phases.remove(&self.id);
    }
}

/// The body of an answer. The connection is idle again when it is sent or abandoned.
struct Answer {
    body: Body,
    connection: Arc<Open>,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.set(Phase::Idle);
    }
}
