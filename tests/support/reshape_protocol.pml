/* How ranks that die, join and lag share the steps of a run by reshape, commit and rollback: a model for Spin.

   A round is one attempt at a step. Any ranks that ask may be dealt into one, the others are late; several rounds may
   be under way at once. Whoever is behind loads the state of the rank that is ahead, or fails to. A step may fail on any
   rank at any time, also where it succeeds on others. A rank dies at any time, and a new one joins in its place.

   What must hold: a step that any rank commits has each row of its global batch once; and the weights of each rank are
   those after all steps before its position, each applied once. */

#ifndef RANKS
#define RANKS 4
#endif
#ifndef ROWS
#define ROWS 5 /* of a global batch: shares differ by a row */
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef KILLS
#define KILLS 2
#endif

#define IDLE 0
#define ASKS 1
#define DEALT 2
#define WAITS 3

typedef Round {
    byte members, contributed; /* ranks, as bits */
    byte step, applied;        /* the position of the rank that is ahead, and its weights */
    byte count[ROWS];          /* how often each row is in the sum of the gradients */
};

typedef Replica {
    byte state, round;
    byte dealt_rank, dealt_size; /* what the round says */
    byte rank, size;             /* the loader's world */
    byte position, next;         /* steps committed; the step that the loader hands out next */
    byte applied;                /* the steps in the weights, as bits */
};

Round rounds[ROUNDS];
Replica replicas[RANKS];
byte num_rounds, num_kills;

#define OWN replicas[i]
#define ITS rounds[OWN.round]
#ifdef EARLY_COMMIT
#define IS_COMPLETE true
#else
#define IS_COMPLETE (ITS.contributed == ITS.members)
#endif

active proctype Quorum() {
    byte i, size, step, applied, members;
    end: do
    :: atomic { num_rounds < ROUNDS ->
            do
            :: i < RANKS ->
                if
                :: OWN.state == ASKS ->
                    OWN.state = DEALT; OWN.round = num_rounds; OWN.dealt_rank = size;
                    members = members | (1 << i); size++;
                    if
                    :: OWN.position >= step -> step = OWN.position; applied = OWN.applied
                    :: else
                    fi
                :: true /* is late, or does not ask */
                fi;
                i++
            :: else -> break
            od;
            i = 0;
            do
            :: i < RANKS ->
                if
                :: members & (1 << i) -> OWN.dealt_size = size
                :: else
                fi;
                i++
            :: else -> break
            od;
            if
            :: members ->
                rounds[num_rounds].members = members; rounds[num_rounds].step = step;
                rounds[num_rounds].applied = applied; num_rounds++
            :: else
            fi;
            i = 0; size = 0; step = 0; applied = 0; members = 0
        }
    od
}

active [RANKS] proctype Rank() {
    byte i = _pid - 1, row;
    bool is_whole;
    end: do
    :: atomic { OWN.state == IDLE && OWN.position < STEPS -> OWN.state = ASKS }

    :: atomic { OWN.state == DEALT ->
            if
            :: OWN.position == ITS.step -> is_whole = true
            :: OWN.position < ITS.step -> /* load_state_dict */
#ifndef NO_STATE
                OWN.position = ITS.step; OWN.next = ITS.step; OWN.applied = ITS.applied;
#endif
                is_whole = true
            :: OWN.position < ITS.step -> is_whole = false /* the state did not come */
            fi;
#ifndef NO_RESHAPE
            OWN.rank = OWN.dealt_rank; OWN.size = OWN.dealt_size; OWN.next = OWN.position;
#else
            if
            :: OWN.size == 0 -> OWN.rank = OWN.dealt_rank; OWN.size = OWN.dealt_size
            :: else
            fi;
#endif
            if
            :: is_whole -> /* a batch, and its gradients into the sum */
                assert(OWN.next == ITS.step);
                OWN.next++;
                row = OWN.rank * ROWS / OWN.size;
                do
                :: row < (OWN.rank + 1) * ROWS / OWN.size -> ITS.count[row]++; row++
                :: else -> break
                od;
                ITS.contributed = ITS.contributed | (1 << i)
            :: else
            fi;
            row = 0; is_whole = false; OWN.state = WAITS
        }

    :: atomic { OWN.state == WAITS && (ITS.contributed & (1 << i)) && IS_COMPLETE -> /* commit */
            do
            :: row < ROWS -> assert(ITS.count[row] == 1); row++
            :: else -> break
            od;
            row = 0;
            assert(OWN.applied == (1 << (OWN.next - 1)) - 1);
            OWN.applied = OWN.applied | (1 << (OWN.next - 1));
            OWN.position = OWN.next; OWN.state = IDLE
        }

    :: atomic { OWN.state == WAITS -> /* the step fails here */
#ifndef NO_ROLLBACK
            OWN.next = OWN.position;
#endif
            OWN.state = IDLE
        }

    :: d_step { num_kills < KILLS && OWN.state != IDLE -> num_kills++;
            OWN.state = IDLE; OWN.rank = 0; OWN.size = 0; OWN.dealt_rank = 0; OWN.dealt_size = 0; OWN.round = 0;
            OWN.position = 0; OWN.next = 0; OWN.applied = 0
        }
    od
}
