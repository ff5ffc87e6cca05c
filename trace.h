// trace.h: when each stream did what in one step, as Chrome trace events.
//
// While a trace is on, what is put into a stream is put between two events; afterwards their times, and so what ran
// beside what, are known without having stopped anything. Ranks begin together, behind a barrier. Time stands in
// microseconds in the file, a process per rank and a thread per stream, as the viewers (chrome://tracing, Perfetto)
// expect it: the "Trace Event Format" of the Chromium project.
#ifndef TRACE_H
#define TRACE_H

#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"

// What the viewer shows as threads.
typedef enum {
    TRACE_COMPUTE,       // operations, on the compute stream
    TRACE_TENSOR,        // exchanges of tensor ranks, on the compute stream too
    TRACE_COMMUNICATION, // collectives of data-parallel ranks
    TRACE_CHANNELS,      // four: from and to the stage before and the one behind
    TRACE_TRACKS = TRACE_CHANNELS + 4
} TraceTrack;

static inline const char *trace_track_name(int track) {
    static const char *const names[TRACE_TRACKS] = {"compute",         "tensor exchange", "communication",
                                                    "receive forward", "send forward",    "receive backward",
                                                    "send backward"};
    return names[track];
}

// A record as ranks exchange it: 60 bytes.
typedef struct {
    char name[48];
    float begin_ms, length_ms;
    int32_t track;
} TraceRecord;

typedef struct {
    char name[48];
    int track;
    cudaEvent_t begin, end;
} TraceSpan;

typedef struct {
    bool on;
    cudaEvent_t origin;
    TraceSpan *spans;
    int count, capacity;
} Trace;

// Starts recording: times count from here in the compute stream.
static inline void trace_start(Trace *trace, cudaStream_t compute) {
    memset(trace, 0, sizeof *trace);
    trace->on = true;
    cuda_check(cudaEventCreate(&trace->origin));
    cuda_check(cudaEventRecord(trace->origin, compute));
}

// Before something is put into a stream. Returns its number, -1 if no trace is on (trace may be NULL).
__attribute__((format(printf, 4, 5))) static inline int trace_begin(Trace *trace, TraceTrack track, cudaStream_t stream,
                                                                    const char *format, ...) {
    if (trace == NULL || !trace->on) return -1;
    if (trace->count == trace->capacity) {
        trace->capacity = trace->capacity > 0 ? 2 * trace->capacity : 1024;
        trace->spans = (TraceSpan *)realloc(trace->spans, (size_t)trace->capacity * sizeof(TraceSpan));
        if (trace->spans == NULL) die("no room for a trace of %d events", trace->capacity);
    }
    TraceSpan *span = &trace->spans[trace->count];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(span->name, sizeof span->name, format, arguments);
    va_end(arguments);
    span->track = track;
    cuda_check(cudaEventCreate(&span->begin));
    cuda_check(cudaEventCreate(&span->end));
    cuda_check(cudaEventRecord(span->begin, stream));
    return trace->count++;
}

// After it has been put there.
static inline void trace_end(Trace *trace, int number, cudaStream_t stream) {
    if (number >= 0) cuda_check(cudaEventRecord(trace->spans[number].end, stream));
}

// Record `number` of a trace whose streams have been waited for; of none beyond the last: a length below 0.
static inline TraceRecord trace_record(const Trace *trace, int number) {
    TraceRecord record;
    memset(&record, 0, sizeof record);
    record.length_ms = -1;
    if (number >= trace->count) return record;
    const TraceSpan *span = &trace->spans[number];
    memcpy(record.name, span->name, sizeof record.name);
    record.track = span->track;
    cuda_check(cudaEventElapsedTime(&record.begin_ms, trace->origin, span->begin));
    cuda_check(cudaEventElapsedTime(&record.length_ms, span->begin, span->end));
    return record;
}

// Stops recording and gives everything back.
static inline void trace_stop(Trace *trace) {
    for (int i = 0; i < trace->count; i++) {
        cuda_check(cudaEventDestroy(trace->spans[i].begin));
        cuda_check(cudaEventDestroy(trace->spans[i].end));
    }
    cuda_check(cudaEventDestroy(trace->origin));
    free(trace->spans);
    memset(trace, 0, sizeof *trace);
}

// The file: its beginning, with the names of ranks and streams; a record; its end.
static inline void trace_write_begin(FILE *file, int ranks) {
    fprintf(file, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
    for (int rank = 0; rank < ranks; rank++) {
        fprintf(file, "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, \"args\": {\"name\": \"rank %d\"}},\n",
                rank, rank);
        for (int track = 0; track < TRACE_TRACKS; track++)
            fprintf(
                file,
                "{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": \"%s\"}},\n",
                rank, track, trace_track_name(track));
    }
}

static inline void trace_write_record(FILE *file, int rank, const TraceRecord *record) {
    if (record->length_ms < 0) return;
    fprintf(file, "{\"ph\": \"X\", \"name\": \"%s\", \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f},\n",
            record->name, rank, (int)record->track, (double)record->begin_ms * 1e3, (double)record->length_ms * 1e3);
}

static inline void trace_write_end(FILE *file, int64_t step) {
    fprintf(file, "{\"ph\": \"M\", \"name\": \"step\", \"pid\": 0, \"args\": {\"step\": %lld}}\n]}\n", (long long)step);
}

#endif
