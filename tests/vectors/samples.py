"""Samples: one legal message of every type, with every field set that may be set together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, layout_pb2, record_pb2, reducer_pb2, ring_pb2, session_pb2
from vectors.bulk import data_plane, ring
from vectors.names import KEY, PARENT, TERM, TOKEN
from vectors.session_samples import session_samples, session_status

__all__ = ["ENVELOPES", "cases_of", "layout", "plan", "samples"]

ENVELOPES: tuple[type[Message], ...] = (
    pb.TrainRequest,
    pb.TrainResponse,
    pb.RegisterReducerRequest,
    pb.RegisterReducerResponse,
    session_pb2.AttendRequest,
    session_pb2.AttendResponse,
    reducer_pb2.ReduceRequest,
    reducer_pb2.ReduceResponse,
    ring_pb2.PassRequest,
)
"""Messages that are one oneof: each of their cases is a vector."""

_LAST = pb.Checkpoint(step=100, folder="/runs/7f3a/checkpoints/step-00000100", head=PARENT)
_DIGEST = hashlib.sha256(b"weights").digest()
_BLOCKS = (
    ("LM_HEAD", "head", (("head.weight", (5, 4), "FLOAT32"),)),
    ("FINAL_NORM", "ln_f", (("ln_f.weight", (4,), "FLOAT32"), ("scale", (), "FLOAT32"))),
    ("TRANSFORMER_BLOCK", "blocks.0", (("blocks.0.weight", (4, 4), "BFLOAT16"),)),
    ("EMBEDDING", "wte", (("wte.weight", (20, 20), "FLOAT32"), ("größe", (2,), "FLOAT16"))),
)


def layout() -> layout_pb2.Layout:
    """A layout with its digest, as docs/protocol-data.md, section 7 writes its text."""
    lines = ["andon.layout.v1"]
    blocks = []
    for kind, name, parts in _BLOCKS:
        lines.append(f"block\t{kind}\t{name}")
        components = []
        for part, shape, dtype in parts:
            lines.append(f"component\t{part}\t{dtype}\t{','.join(map(str, shape))}")
            components.append(
                layout_pb2.Component(name=part, shape=shape, dtype=_number(layout_pb2.Dtype, dtype))
            )
        blocks.append(
            layout_pb2.Block(
                kind=_number(layout_pb2.BlockKind, kind), name=name, components=components
            )
        )
    text = "".join(f"{line}\n" for line in lines)
    return layout_pb2.Layout(blocks=blocks, digest=hashlib.sha256(text.encode()).digest())


def _number(enum: Any, name: str) -> Any:
    return enum.Value(f"{'DTYPE' if enum is layout_pb2.Dtype else 'BLOCK_KIND'}_{name}")


def record(kind: Any = record_pb2.RECORD_KIND_STEP) -> record_pb2.Record:
    """A record of the sample's round."""
    return record_pb2.Record(
        key=KEY,
        parent=PARENT,
        kind=kind,
        step=118,
        cursor=record_pb2.Cursor(
            epoch=1, position=7552, owed=[record_pb2.PositionRange(start=7531, stop=7552)]
        ),
        roster=[1, 0, 3],
    )


def evidence() -> halt_pb2.HaltEvidence:
    """A halt on a NaN."""
    return halt_pb2.HaltEvidence(
        id=3,
        reason=halt_pb2.HALT_REASON_NON_FINITE_GRADIENT,
        key=KEY,
        step=118,
        worker=0,
        block=0,
        parameter="head.weight",
        element=[4, 3],
        value="nan",
        message="worker 0 sent NaN",
        at_unix_s=1700000000.5,
        epoch=1,
        positions=record_pb2.PositionRange(start=7488, stop=7552),
        reported_by=2,
    )


def plan() -> pb.RunPlan:
    """A run of a known length, twice."""
    return pb.RunPlan(
        dataset_size=60000,
        global_batch=64,
        seed=2**63 + 1,
        total_steps=1000,
        total_epochs=2,
        data_digest=bytes(range(32)),
        drop_last=True,
        sparse=True,
        grain=8,
        tree=1,
    )


def _shares() -> list[pb.ReducerShare]:
    return [
        pb.ReducerShare(start_element=0, stop_element=25),
        pb.ReducerShare(address="10.0.0.2:7071", start_element=25, stop_element=443),
    ]


def _control_up() -> list[Message]:
    join = pb.Join(
        run_id="7f3a",
        node_id="alpha",
        launch_slot=0,
        incarnation=0x0123456789ABCDEF,
        devices=[pb.Device(kind="cuda", name="a GPU", memory_bytes=80 * 2**30, cores=132)],
        backend="cuda",
        protocol_version=1,
        capabilities=["crc32c.v1", "ring.v1"],
        layout=layout(),
        plan=plan(),
        metrics_address="10.0.0.1:9401",
        head=PARENT,
        cursor=record_pb2.Cursor(epoch=1, position=7488),
        step=117,
        held_key=KEY,
        greatest_term=TERM,
        halt=evidence(),
        token=b"secret",
        mid_script=True,
        speed_hint=2.5,
        pacing=b"{}",
        checkpoints=pb.CheckpointPlan(every=100, folder="/runs/7f3a/checkpoints", keep=3),
        process=pb.ProcessPlace(host=_DIGEST[:16], id=4711),
        spare=True,
        arithmetic=[
            pb.ArithmeticItem(name="threads", value="1"),
            pb.ArithmeticItem(name="torch", value="2.13.0"),
        ],
    )
    ready = pb.StepReady(
        key=KEY,
        loss_sum=38.5,
        weight=16.0,
        samples=16,
        correct=7,
        timings=pb.Timings(
            compute_s=0.25,
            exchange_s=0.125,
            wait_s=0.0625,
            data_s=0.5,
            busy_s=0.1875,
            micro_batches=4,
            computed=12,
        ),
        digest=pb.WeightsDigest(head=PARENT, sha256=_DIGEST),
        end_of_data=True,
        stop_reason="val loss is rising",
        total_weight=48.0,
        world_size=3,
        gradient_norm=1.75,
        own_gradient_norm=2.25,
        block_norms=[0.25, 1.5],
        overflow=True,
        next=pb.RequestWork(
            ring_address="10.0.0.3:7100",
            checkpoint=pb.Checkpoint(step=100, folder="/runs/7f3a/step-00000100"),
            checkpoint_begun=200,
        ),
        node_losses=[
            pb.NodeLoss(first=4, grains=1, weight=8.0, loss_sum=19.25),
            pb.NodeLoss(first=6, grains=2, weight=8.0, loss_sum=19.25),
        ],
        attested=[
            pb.Attestation(
                first=4,
                grains=1,
                digest=_DIGEST[:16],
                samples=_DIGEST[:16],
                components=_DIGEST,
            ),
            pb.Attestation(first=6, grains=2, digest=_DIGEST[16:]),
        ],
        averages_digest=_DIGEST[:16],
        mean_check=pb.MeanCheck(
            expected=_DIGEST[:16],
            came=_DIGEST[16:],
            relayed=[_DIGEST[:16]],
            apart=pb.ElementApart(block=1, element=17, expected=0.5, came=0.25),
        ),
        apart=[
            pb.NodeApart(
                first=6,
                grains=2,
                own=_DIGEST[16:],
                other=_DIGEST[:16],
                element=pb.ElementApart(block=1, element=17, expected=0.5, came=0.25),
            )
        ],
    )
    fault = pb.Fault(
        key=KEY,
        kind=pb.FAULT_KIND_NON_FINITE_GRADIENT,
        rank=0,
        block=0,
        element=19,
        value="nan",
        message="rank 0 contributed nan",
        error_type="ValueError",
        greatest=record_pb2.Key(term=TERM + 2**32, round=1),
    )
    return [
        join,
        pb.RequestWork(
            head=PARENT,
            ring_address="[::1]:7101",
            leaves_epoch=True,
            checkpoint=_LAST,
            checkpoint_begun=200,
            voided=KEY,
        ),
        ready,
        fault,
        pb.Heartbeat(
            sequence=1,
            activity=pb.ACTIVITY_COMPUTING,
            detail="forward",
            scalars=[
                pb.LoggedScalar(name="val/loss", step=117, value=2.5),
                pb.LoggedScalar(name="lr", step=117, value=float("inf")),
            ],
            busy_cores=1.5,
            memory_bytes=2**31,
        ),
        pb.Leave(
            reason=pb.LEAVE_REASON_COMPLETE,
            message="done",
            final_step=118,
            digest=pb.WeightsDigest(head=KEY, sha256=_DIGEST),
            checkpoint=_LAST,
        ),
        pb.StateReport(transfer_id=7 * 2**32 + 1, head=PARENT, failure="the disk is full"),
        pb.ScalarAllReduce(
            head=PARENT,
            sequence=1,
            value=0.5,
            weight=100.0,
            digest=pb.WeightsDigest(
                head=PARENT, sha256=_DIGEST, prefixes=_DIGEST[:16], base_hashed=True
            ),
            data=b"rank 0",
        ),
        pb.Listening(),
        pb.Computed(key=KEY),
        pb.Notice(message="SIGTERM"),
        pb.ProbeAnswer(number=3),
        pb.Explanation(
            number=4, phase=pb.SLOW_PHASE_DATA, detail="loads", stacks=[_stack()], facts=_facts()
        ),
    ]


def _control_down() -> list[Message]:
    policy = pb.Policy(
        chunk_elements=2**19,
        encoding=layout_pb2.ENCODING_BFLOAT16,
        answer_encoding=layout_pb2.ENCODING_FLOAT32,
        digest_every=50,
        max_steps=1000,
        gradient_norm=True,
        topology=ring_pb2.TOPOLOGY_STAR,
        local_steps=16,
        outer=pb.OuterOptimizer(learning_rate=0.5, momentum=0.875),
        overlap=True,
        overlap_steps=2,
        quorum=0.75,
        max_late=8,
        max_grad_norm=1.0,
        own_gradient_norm=True,
        average_buffers=True,
        fragments=4,
        mix=0.5,
        topk_kept=16,
        mean=pb.MEAN_KIND_WEIGHTED,
    )
    return [
        pb.JoinAccepted(
            worker=1,
            session_token=TOKEN,
            reducers=_shares(),
            plan=plan(),
            policy=policy,
            liveness=pb.Liveness(lease_s=3.0, heartbeat_s=1.0, reconnect_s=300.0),
            run_id="7f3a",
            join_status=pb.JOIN_STATUS_BEHIND,
            head=PARENT,
            step=117,
            term=TERM,
            halt=evidence(),
            capabilities=["block-norms.v1", "hashed-base.v1", "overflow.v1", "standing.v1"],
            control_socket="andon-0123456789abcdef0123456789abcdef.socket",
        ),
        pb.ShardAssignment(
            writes_checkpoint=True,
            targets=[3, 2, 1],
            interleaved=True,
            window=768,
            ahead=[record_pb2.PositionRange(start=7573, stop=7595)],
            ahead_batch=record_pb2.PositionRange(start=7552, stop=7616),
            ahead_micro_batches=2,
            wants_digest=True,
            attends=True,
            attended=True,
            attests=True,
            verifies=[1, 6],
            anew=True,
            itemised=True,
            sums=[
                pb.NodeOwner(first=0, grains=4, rank=0, relayed=True),
                pb.NodeOwner(first=4, grains=4, rank=1, relayed=True),
            ],
            fragment=2,
            learning_rate_scale=1.5,
            copies_buffers=True,
            change_scale=0.75,
            checkpoint_step=100,
            key=KEY,
            parent=PARENT,
            roster=[1, 0, 3],
            rank=1,
            world_size=3,
            step=118,
            attempt=1,
            epoch=1,
            positions=[
                record_pb2.PositionRange(start=7488, stop=7500),
                record_pb2.PositionRange(start=7510, stop=7514),
            ],
            batch=record_pb2.PositionRange(start=7488, stop=7552),
            micro_batches=2,
            reducers=_shares(),
            ring=ring_pb2.RingNeighbours(
                successor_address="10.0.0.3:7101",
                successor_token=TOKEN,
                predecessor_token=TOKEN[::-1],
            ),
        ),
        pb.StepCommitted(
            record=record(),
            loss=2.40625,
            samples=48,
            contributors=3,
            stop_reason="drained",
            correct=21,
            pacing=b"{}",
            overflow=True,
            gradient_scale=0.25,
            assignment=pb.ShardAssignment(
                key=record_pb2.Key(term=KEY.term, round=KEY.round + 1),
                parent=KEY,
                roster=[0],
                world_size=1,
            ),
        ),
        pb.Halt(evidence=evidence()),
        pb.Resume(halt_id=3, answer=pb.HALT_ANSWER_SKIP),
        pb.Shutdown(message="the run is over: drained", stop_reason="drained", keep_state=True),
        pb.StateTransfer(
            transfer_id=7 * 2**32 + 1,
            head=PARENT,
            role=pb.TRANSFER_ROLE_RECEIVE,
            address="10.0.0.2:7071",
            peer=2,
            step=117,
            cursor=record_pb2.Cursor(epoch=1, position=7488),
            beside_training=True,
            checkpoint=_LAST,
        ),
        pb.HeartbeatAnswer(sequence=1, unix_time_s=1_750_000_000.25),
        pb.ScalarAllReduceResult(
            head=PARENT,
            sequence=1,
            value=0.625,
            weight=300.0,
            contributors=3,
            data=[b"rank 0", b"", b"rank 2"],
        ),
        pb.RoundVoided(key=KEY, message="worker 2: its stream ended"),
        pb.Learn(reducers=_shares()),
        pb.Probe(number=3),
        pb.Late(key=KEY),
        pb.Explain(number=4),
    ]


def _stack() -> pb.ThreadStack:
    line = pb.CodeLine(file="/home/ada/dataset.py", line=42, function="__getitem__", own=True)
    return pb.ThreadStack(thread="the script", lines=[line])


def _facts() -> pb.ProcessFacts:
    """Each number once, so that none can be taken for another."""
    return pb.ProcessFacts(
        apart_s=0.15625,
        script_cores=0.0625,
        process_cores=0.125,
        child_cores=1.5,
        children=2,
        waited_for_core=0.25,
        host_busy_cores=3.5,
        host_cores=4,
        major_faults=12.0,
        swapped_in=4096.0,
        swap_bytes=2**20,
        memory_bytes=2**30,
        free_bytes=2**31,
        waited_for_disk=0.5,
        disk_bytes=65536.0,
        retransmitted=7,
        unsent_bytes=131072,
        delivered=1e6,
        gpu_mhz=900.0,
        gpu_most_mhz=1980.0,
        gpu_throttled="thermal",
        held_s=1.25,
        threads_waited=1.75,
        allowed_cores=2.5,
        throttled=0.375,
        stolen_cores=0.75,
        cpu_pressure=0.8125,
        memory_pressure=0.4375,
        disk_pressure=0.3125,
        busiest="python3 (5 processes, such as 4711)",
        busiest_cores=2.75,
        largest="java (process 812)",
        largest_bytes=2**33,
    )


def _slowness() -> pb.Slowness:
    return pb.Slowness(
        worker=1,
        step=118,
        phase=pb.SLOW_PHASE_DATA,
        late_s=0.75,
        text="worker 1 waits for data",
        guilty=_stack().lines[0],
        at_unix_s=1.7e9,
        stacks=[_stack()],
        facts=_facts(),
    )


def _people() -> list[Message]:
    status = pb.LineStatus(
        session=session_status(),
        checkpoints=pb.CheckpointStatus(
            writer=0,
            node_id="alpha",
            folder="/runs/7f3a/checkpoints",
            every=50,
            last=_LAST,
            overdue=100,
            elsewhere=True,
        ),
        schedule="cadence",
        schedule_note="the workers' devices differ",
        tcp_port=7170,
        grain=8,
        verification=pb.VerificationStatus(
            fraction=0.125, steps=14, grains=168, differences=1, convicted=[2]
        ),
        one_arithmetic=True,
        quorum=0.75,
        fragments=4,
        cost=pb.RunCost(
            machine_seconds=5400.0,
            price_per_hour=0.75,
            currency="EUR",
            cost=1.125,
            samples_per_unit=6656.0,
            tokens_per_unit=3407872.0,
        ),
        noise_scale=1500.5,
        mean=pb.MEAN_KIND_TRIMMED,
        trimmed=1,
        run_id="7f3a",
        state=pb.LINE_STATE_HALTED,
        step=117,
        attempt=1,
        cursor=record_pb2.Cursor(epoch=1, position=7488),
        loss=2.413,
        total_steps=1000,
        live=2,
        participating=2,
        workers=[
            pb.WorkerStatus(
                worker=1,
                rank=0,
                node_id="beta",
                device="cpu",
                activity=pb.ACTIVITY_HALTED,
                detail="waiting",
                step=117,
                samples_per_second=812.5,
                waiting_ratio=0.25,
                heartbeat_age_s=0.2,
                live=True,
                metrics_address="10.0.0.1:9401",
                final_digest=_DIGEST,
                share=0.25,
                micro_batches=2,
                hardware=pb.Device(kind="cpu", name="AMD EPYC", memory_bytes=2**34, cores=2),
                timings=pb.Timings(compute_s=0.25, exchange_s=0.125, wait_s=0.0625, data_s=0.5),
                step_s=0.75,
                late_records=2,
                owed_positions=21,
                slowness=_slowness(),
                slow="eased: 3.4 times as slow as the others for 20 steps",
                notice="SIGTERM",
            )
        ],
        halt=evidence(),
        samples_per_second=1204.0,
        exchange_s=0.006,
        hidden_ratio=0.8125,
        metrics_url="http://127.0.0.1:9400/metrics",
        expect_workers=2,
        waiting_for="an answer to halt 3",
        samples=48,
        stop_reason="drained",
        reducers=[pb.ReducerStatus(address="10.0.0.2:7071", elements=418)],
        expect_reducers=2,
        correct=21,
        slowness=[_slowness()],
    )
    return [
        status,
        pb.GetStatusRequest(run_id="7f3a"),
        pb.GetStatusResponse(status=status),
        pb.WatchStatusRequest(run_id="7f3a"),
        pb.WatchStatusResponse(status=status),
        pb.PullCordRequest(run_id="7f3a", reason="loss looks odd", operator="ada"),
        pb.PullCordResponse(halt=evidence()),
        pb.ClearHaltRequest(
            run_id="7f3a", halt_id=3, answer=pb.HALT_ANSWER_DROP, worker=1, operator="ada"
        ),
        pb.ClearHaltResponse(status=status),
        pb.DrainRequest(run_id="7f3a", operator="ada"),
        pb.DrainResponse(status=status),
        pb.ReducerOffer(
            run_id="7f3a",
            address="10.0.0.2:7071",
            protocol_version=1,
            metrics_address="10.0.0.2:9401",
        ),
        pb.ReducerProof(mac=TOKEN),
        pb.ReducerChallenge(nonce=TOKEN),
        pb.ReducerRegistered(run_id="7f3a", announces=True),
        pb.ReducerDismissed(message="the run is over"),
        pb.RoundOpening(key=KEY),
        pb.TransferOpening(
            transfer_id=7 * 2**32 + 1,
            donor=pb.Session(worker=2, term=TERM, number=3),
            joiner=pb.Session(worker=0, term=TERM, number=9),
            beside_training=True,
            holds_up=True,
        ),
        pb.SessionsRevoked(least=pb.Session(worker=1, term=TERM, number=6)),
    ]


def samples() -> dict[str, Message]:
    """A sample of every message that is no envelope, by its name; parts come out of wholes."""
    found: dict[str, Message] = {}
    wholes = [*_control_up(), *_control_down(), *_people(), *data_plane(), *ring()]
    wholes += session_samples()
    for whole in wholes:
        found[whole.DESCRIPTOR.name] = whole
    envelopes = {envelope.DESCRIPTOR.name for envelope in ENVELOPES}
    for whole in wholes:
        for part in _parts(whole):
            if part.DESCRIPTOR.name not in envelopes:
                found.setdefault(part.DESCRIPTOR.name, part)
    return dict(sorted(found.items()))


def _parts(message: Message) -> list[Message]:
    """The messages inside a message, at any depth."""
    parts: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if isinstance(value, Message) else value:
            parts += [part, *_parts(part)]
    return parts


def cases_of(envelope: type[Message], known: Mapping[str, Message]) -> dict[str, Message]:
    """An envelope with each of its cases, by the case's name."""
    cases: dict[str, Message] = {}
    for field in envelope.DESCRIPTOR.oneofs_by_name["message"].fields:
        assert field.message_type is not None
        cases[field.name] = envelope(**{field.name: known[field.message_type.name]})
    return cases
